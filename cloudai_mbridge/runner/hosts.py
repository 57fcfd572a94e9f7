"""Runs whose jobs are processes of one machine: of the local system, or launchers. Only that machine knows of them."""

import socket
from collections.abc import Collection, Iterable
from pathlib import Path

from cloudai_mbridge.errors import InUse, shown
from cloudai_mbridge.launch.claim import claimed_by
from cloudai_mbridge.runner.journal.rows import JournalEntry
from cloudai_mbridge.runner.journal.submission_log import SubmissionLog


def require_this_host(root: Path, entries: Iterable[JournalEntry], lost_hosts: Collection[str] = ()) -> None:
    """Refuse to judge processes of another machine: from here each of them seems to have been killed.

    lost_hosts: machines that no longer run, and their processes neither.

    Raises:
        InUse: a process of another machine has not ended as far as the journal knows.
    """
    known = ("", socket.gethostname(), *lost_hosts)
    in_journal = {(entry.key, attempt.token): attempt for entry in entries for attempt in entry.attempts}
    for logged in SubmissionLog(root).read():
        attempt = in_journal.get((logged.key, logged.token))
        if logged.is_withdrawn or logged.host in known or (attempt is not None and attempt.ended_at is not None):
            continue
        job_id = (attempt and attempt.job_id) or claimed_by(root / logged.key, logged.token) or ""
        if "." in job_id:  # a process id and a token; Slurm's ids are numbers
            raise InUse(
                f"{root}: {logged.key} is a process on {shown(logged.host)}; resume or cancel the run there,"
                f" or, if that machine no longer runs, add --lost-host {shown(logged.host)}"
            )
