#!/usr/bin/env python3
"""ci/comment.py FILE: post a gate's Markdown in a pull request, as one comment that later runs replace.

COMMENTS: address of the pull request's comments, in the API of GitHub or GitLab.
COMMENT_TOKEN: token that may write them.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

MARK = "<!-- mbridge gate -->"
MOST = 60_000  # characters; GitHub takes 65,536
PAGE = 100


def ask(method: str, address: str, data: object = None) -> Any:
    """Send a request, and return the answer. A redirection does not get the token."""
    request = Request(address, json.dumps(data).encode() if data else None, method=method)
    request.add_header("Content-Type", "application/json")
    request.add_unredirected_header("Authorization", f"Bearer {os.environ['COMMENT_TOKEN'].strip()}")
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)


def earlier(comments: str) -> int | None:
    """Return the id of the comment of an earlier run, None without one."""
    page = 1
    while found := ask("GET", f"{comments}?per_page={PAGE}&page={page}"):
        if not isinstance(found, list):
            raise ValueError
        for comment in found:
            if (comment["body"] or "").startswith(MARK):
                return int(comment["id"])
        page += 1
    return None


def main(file: Path) -> None:
    text = file.read_text(encoding="utf-8") if file.is_file() else "The benchmark ended before its gate."
    if len(text) > MOST:
        text = text[: text.rfind("\n", 0, MOST)]
        fences = re.findall("^`{3,}", text, re.MULTILINE)
        text += f"\n{fences[-1] if len(fences) % 2 else ''}\n\nThe rest is in the job's files."
    job = next(filter(None, map(os.environ.get, ("JOB_URL", "CI_JOB_URL", "BUILD_URL"))), "")
    body = {"body": f"{MARK}\n{text}\n\n[The job]({job})"}
    comments = os.environ["COMMENTS"]
    own = earlier(comments)
    if own is None:
        ask("POST", comments, body)
    elif comments.endswith("/notes"):  # GitLab
        ask("PUT", f"{comments}/{own}", body)
    else:
        ask("PATCH", re.sub(r"/\d+/comments$", f"/comments/{own}", comments), body)


if __name__ == "__main__":
    if missing := [name for name in ("COMMENTS", "COMMENT_TOKEN") if not os.environ.get(name)]:
        sys.exit(f"ci/comment.py: the comment was not posted: {' and '.join(missing)} not set; see the workflow's file")
    if len(sys.argv) != 2:
        sys.exit("usage: ci/comment.py FILE")
    try:
        main(Path(sys.argv[1]))
    except (OSError, ValueError, KeyError) as error:
        why = type(error).__name__ if isinstance(error, ValueError) else repr(error)  # its text may contain the token
        sys.exit(f"ci/comment.py: the comment was not posted: {why}")
