"""What jobs have left behind, compared with what is known of submissions: nothing may be trained again unseen."""

from collections.abc import Collection
from pathlib import Path

from cloudai_mbridge.errors import Damaged
from cloudai_mbridge.launch.claim import claiming_tokens
from cloudai_mbridge.plan import POINT_FILES, ROOT_FILES
from cloudai_mbridge.runner.journal.journal import Journal
from cloudai_mbridge.runner.journal.rows import JournalEntry
from cloudai_mbridge.runner.journal.submission_log import SubmissionLog

_REMEDY = f"restore {ROOT_FILES.journal}, or start a new run"


def require_known(root: Path, entries: Collection[JournalEntry], log: SubmissionLog) -> None:
    """Check that the journal and the log of submissions together know all jobs.

    Raises:
        Damaged: a job has started of which they know nothing; or both are incomplete.
    """
    logged = log.read()
    has_journal = any(entry.attempts for entry in entries)
    if not has_journal and (line := log.damaged_line()) is not None:
        path = root / ROOT_FILES.submissions
        raise Damaged(f"{path}:{line}: is damaged, and {ROOT_FILES.journal} knows of no job; {_REMEDY}")
    known = {(entry.key, attempt.token) for entry in entries for attempt in entry.attempts}
    known |= {(attempt.key, attempt.token) for attempt in logged}
    for key in (entry.key for entry in entries):
        has_started = not known and (root / key / POINT_FILES.started).exists()
        if has_started or any((key, token) not in known for token in claiming_tokens(root / key)):
            raise Damaged(f"{root}: a job of {key} has started, and {ROOT_FILES.journal} does not know it; {_REMEDY}")


def restore_tokens(journal: Journal, log: SubmissionLog) -> None:
    """Take an attempt's token from the log of submissions where the journal has one that was never submitted.

    Under a wrong token its job would not be found, and the run be submitted again beside it.
    """
    submitted = log.read()
    known = {(attempt.key, attempt.token) for attempt in submitted}
    right = {(attempt.key, attempt.number): attempt.token for attempt in submitted if not attempt.is_withdrawn}
    for key, number, token in journal.tokens():
        if (key, token) not in known and (key, number) in right:
            journal.retoken(key, number, right[key, number])
