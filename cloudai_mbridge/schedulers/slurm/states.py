"""Every job state that Slurm documents (squeue(1), sacct(1): JOB STATE CODES), classified."""

import re

from cloudai_mbridge.schedulers.interface import JobClass

_CLASSES: dict[JobClass, tuple[str, ...]] = {
    JobClass.ACTIVE: (
        "PENDING",
        "CONFIGURING",
        "RUNNING",
        "COMPLETING",
        "SIGNALING",
        "STAGE_OUT",
        "STOPPED",
        "SUSPENDED",
        "RESIZING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
        "POWER_UP_NODE",
        "EXPEDITING",
        "UPDATE_DB",
    ),
    JobClass.SUCCEEDED: ("COMPLETED",),
    JobClass.FAILED: ("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE"),
    JobClass.INFRASTRUCTURE: ("NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "PREEMPTED"),
    JobClass.CANCELLED: ("CANCELLED",),
    # another cluster of a federation has started the job, and is not asked
    JobClass.UNKNOWN: ("REVOKED",),
}
_CLASS_OF = {state: job_class for job_class, states in _CLASSES.items() for state in states}


def base_state(state: str) -> str:
    """Return the state without what Slurm appends: "CANCELLED by 1000", "COMPLETED+"."""
    match = re.match(r"[A-Z_]+", state.strip().upper())
    return match[0] if match else ""


def classify(state: str) -> JobClass:
    """Return the class of a state; one that is not documented is UNKNOWN, which is never a success."""
    return _CLASS_OF.get(base_state(state), JobClass.UNKNOWN)


# The partition allows fewer nodes than the job wants, for ever; or too many of them are down, and come back.
PARTITION_NODE_LIMIT = "PartitionNodeLimit"
# squeue(1), JOB REASON CODES: why a job waits for something that will not come by waiting. A site's administrator can
# change any of them, so the runner looks twice before it gives up.
_HOPELESS = frozenset(
    (
        "AccountNotAllowed",
        "BadConstraints",
        "DependencyNeverSatisfied",
        "InvalidAccount",
        "InvalidQOS",
        "PartitionConfig",
        PARTITION_NODE_LIMIT,
        "PartitionTimeLimit",
        "QOSNotAllowed",
        "AssocGrpCPUMinutesLimit",
        "AssocMaxCpuPerJobLimit",
        "AssocMaxNodePerJobLimit",
        "AssocMaxWallDurationPerJobLimit",
        "AssocMaxGRESPerJob",
        "AssocMaxCPUMinutesPerJobLimit",
        "QOSMaxCpuPerJobLimit",
        "QOSMaxNodePerJobLimit",
        "QOSMaxWallDurationPerJobLimit",
        "QOSMaxGRESPerJob",
        "QOSMinGRES",
        "QOSMinNode",
        "QOSMaxCpuMinutesPerJobLimit",
        "ReservationDeleted",
        "AccountingPolicy",
    )
)
# With words: what a controller that was killed does not remember to have launched.
_LAUNCH_FAILED = re.compile(r"launch[ _]failed[ _]requeued[ _]held", re.IGNORECASE)


# Somebody holds the job, and may release it.
_HELD_STATES = frozenset(("REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"))
_HELD_REASONS = frozenset(("JobHeldAdmin", "JobHeldUser", "job_requeued_in_held_state"))


def hopeless(state: str, reason: str) -> JobClass | None:
    """Return what a job that waits for something that will not come is to count as, or None; CANCELLED: it is held."""
    base = base_state(state)
    if base in _HELD_STATES or (base == "PENDING" and reason.replace(" ", "_") in _HELD_REASONS):
        return JobClass.CANCELLED
    if base != "PENDING":
        return None
    if _LAUNCH_FAILED.search(reason):
        return JobClass.INFRASTRUCTURE
    return JobClass.FAILED if reason in _HOPELESS else None
