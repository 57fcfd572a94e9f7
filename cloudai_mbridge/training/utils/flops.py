"""The formula's name where the log lines import it from; the formulas are in `cloudai_mbridge.training.flops`."""

from cloudai_mbridge.training.flops import FLOPS_FORMULA

__all__ = ["FLOPS_FORMULA"]
