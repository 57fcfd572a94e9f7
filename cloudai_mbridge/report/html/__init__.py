"""The report as one self-contained HTML file: no network, no server, no fonts."""

from cloudai_mbridge.report.html.render import log_links, render_html, render_report_file

__all__ = ["log_links", "render_html", "render_report_file"]
