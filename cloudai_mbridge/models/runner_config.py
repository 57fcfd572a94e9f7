"""The `[runner]` table of a scenario: how its runs are brought to their end. Ours; CloudAI has none."""

from pydantic import Field

from cloudai_mbridge.models.base import StrictModel


class RunnerConfig(StrictModel):
    """Limits, patience and retries."""

    max_parallel: int | None = Field(
        None, ge=1, description="runs that may be active at a time; default: one on this machine, no limit on Slurm"
    )
    max_gpu_hours: float | None = Field(
        None, gt=0, description="GPUs x run time over the whole scenario, retries included; needs a time_limit"
    )
    retries: int = Field(2, ge=0, description="fresh jobs for a run that the infrastructure failed")
    fail_fast: bool = Field(False, description="stop everything at the first run that fails")
    hang_timeout_s: float = Field(
        1800.0, gt=0, description="without a step for so long, a running job is cancelled and its stacks kept"
    )
    pre_test_timeout_s: float = Field(3600.0, gt=0, description="nodes that pass no pre_test in this time are excluded")
    patience_s: float = Field(
        1800.0, gt=0, description="how long a scheduler may be silent before mbridge ends, to be resumed"
    )
    settle_s: float = Field(
        15.0, gt=0, description="how long the job of a failed submission is looked for, once the scheduler answers"
    )
    unknown_s: float = Field(
        300.0, gt=0, description="how long a job's state may be unknown before the run counts as lost"
    )
