"""Run Megatron-Bridge's launcher as a child process of this one, and follow the Slurm job that it submits.

The launcher stays until its job has ended and writes the job's log. Slurm decides how the job ended: the launcher
also exits with an error when a good run differs from golden values that few users have.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.files.regular import open_regular, read_chunks
from cloudai_mbridge.launch.claim import process_of
from cloudai_mbridge.megatron_bridge.launcher_plan import HF_TOKEN
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.plan import POINT_FILES, RunPlan
from cloudai_mbridge.plan.launcher_command import find_job_ids, launcher_path, python_path
from cloudai_mbridge.plan.launchers import EMBEDDED, MEGATRON_BRIDGE, RunLauncher
from cloudai_mbridge.schedulers.interface import FORGOTTEN, Job, JobClass, JobStatus, Scheduler, Seen, Submission
from cloudai_mbridge.schedulers.local import Child, find_scripts
from cloudai_mbridge.schedulers.slurm import SlurmClient
from cloudai_mbridge.schedulers.slurm.commands import without_slurm_variables

_LONGEST_LINE = 1 << 16
_T = TypeVar("_T")


class _LauncherJob(Child):
    """A launcher as last polled: its exit code, how far its log was read, and the jobs that it said it submitted."""

    code: int | None = None
    offset = 0
    job_ids: tuple[str, ...] = ()
    is_cancelled = False

    def refresh(self) -> None:
        """Poll the process first, and then read the whole lines that its log has grown by."""
        self.code = self.poll()
        try:
            with open_regular(self.directory / POINT_FILES.launcher_log) as log:
                log.seek(self.offset)
                data = b"".join(read_chunks(log))
                end = log.tell()
        except OSError:
            return
        whole = data.rfind(b"\n") + 1 if len(data) < _LONGEST_LINE and self.code is None else len(data)
        self.offset = end - (len(data) - whole)
        self.job_ids = tuple(dict.fromkeys([*self.job_ids, *find_job_ids(data[:whole])]))


class UpstreamClient(SlurmClient):
    """Launchers on this machine, their jobs on a Slurm cluster. A run's id is its launcher's: launcher-PID.TOKEN."""

    def __init__(self, system: SlurmSystem, runs: Iterable[RunPlan]) -> None:
        super().__init__(system)
        self._runs = [run for run in runs if run.launcher is MEGATRON_BRIDGE]
        self._launches: dict[str, _LauncherJob] = {}

    def preflight(self) -> None:
        """Check that a token is there, that the launcher is installed, and that Slurm has the partition."""
        for run in self._runs:
            is_wanted = HF_TOKEN in run.of_launcher.credentials
            if is_wanted and not (run.secret_env.get(HF_TOKEN) or os.environ.get(HF_TOKEN, "").strip()):
                raise BadInput(
                    f"test {run.test_id!r}: cmd_args.hf_token is missing; set it, or {HF_TOKEN} in the environment"
                )
        for run in self._runs:
            for path in (python_path(run.of_launcher, self._system), launcher_path(run.of_launcher, self._system)):
                if not path.exists():
                    raise ToolFailure(f"{path}: no such file; run `mbridge install` first")
        super().preflight()

    def batches(self, runs: Sequence[RunPlan]) -> list[tuple[RunPlan, ...]]:
        return [(run,) for run in runs]

    def submit(self, submission: Submission, root: Path) -> dict[str, str]:
        """Start the launcher. Credentials travel in its environment only."""
        (run,) = submission.runs
        env = {**without_slurm_variables(os.environ), **run.secret_env}
        launch = _LauncherJob.start(submission.token, POINT_FILES.launcher_script, root / run.key, env)
        job_id = str(replace(launch.id, is_launcher=True))
        self._launches[job_id] = launch
        return {run.key: job_id}

    def find(self, submissions: Iterable[Submission], root: Path) -> dict[str, str]:
        return find_scripts(submissions, root, is_launcher=True)

    def _launch(self, job: Job) -> _LauncherJob:
        """Return a launch, including a launch of an earlier process."""
        if job.job_id not in self._launches:
            self._launches[job.job_id] = _LauncherJob.of(job.job_id, job.directory)
        return self._launches[job.job_id]

    def poll(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        """Poll the launchers, and query Slurm once for all of their jobs."""
        launches = {job.key: (job, self._launch(job)) for job in jobs}
        for _, launch in launches.values():
            launch.refresh()
        # the last job of each; it carries no token of ours: the launcher names it
        told = {key: launch for key, (_, launch) in launches.items() if launch.job_ids}
        seen = super().poll([Job(key, each.job_ids[-1], "", each.directory) for key, each in told.items()])
        return {
            key: Seen(job.job_id, self._status(launch, seen[key].status if launch.job_ids else None))
            for key, (job, launch) in launches.items()
        }

    def observe(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        """Read what the launchers have logged, and query Slurm once for their jobs."""
        launches = {job.key: (job, _LauncherJob.of(job.job_id, job.directory)) for job in jobs}
        for _, launch in launches.values():
            launch.refresh()
        told = {key: launch for key, (_, launch) in launches.items() if launch.job_ids}
        seen = super().observe([Job(key, each.job_ids[-1], "", each.directory) for key, each in told.items()])
        return {
            key: Seen(job.job_id, _observed(launch, seen[key].status if key in seen else None))
            for key, (job, launch) in launches.items()
        }

    def _status(self, launch: _LauncherJob, job: JobStatus | None) -> JobStatus:
        code = launch.code
        if code is None:
            if job is None or job.is_final:  # the launcher is still to submit, or to log the end
                return JobStatus("PENDING" if job is None else "RUNNING", JobClass.ACTIVE)
            return _naming(job, launch.job_ids[-1])
        launch.kill_leftovers()
        if launch.is_cancelled:
            is_over = job is None or job.is_final
            return JobStatus("CANCELLED", JobClass.CANCELLED) if is_over else JobStatus("COMPLETING", JobClass.ACTIVE)
        if code < 0:  # without the launcher nothing follows the job
            super().cancel(_jobs(launch))
            return JobStatus("FAILED", JobClass.FAILED, signal=-code, reason="the launcher's script was killed")
        if job is None:
            reason = f"the launcher submitted no job; see {POINT_FILES.launcher_log}"
            return JobStatus("FAILED", JobClass.FAILED, exit_code=code or 1, reason=reason)
        return _naming(job, launch.job_ids[-1], f"; its launcher exited with {code}" if job.is_final and code else "")

    def cancel(self, jobs: Iterable[Job]) -> None:
        """End the launchers first, so that none submits again, then cancel their jobs."""
        launches = [self._launch(job) for job in jobs]
        for launch in launches:
            launch.is_cancelled = True
            if launch.poll() is None:
                launch.end()
            launch.refresh()
        super().cancel([job for launch in launches for job in _jobs(launch)])

    def may_start(self, run: RunPlan, status: JobStatus) -> bool:
        return super().may_start(run, _unnamed(status))

    def exceeded(self, run: RunPlan, status: JobStatus) -> str:
        return super().exceeded(run, _unnamed(status))


def _observed(launch: _LauncherJob, job: JobStatus | None) -> JobStatus:
    """Return the status of a launch for a reader. job: its Slurm job's.

    Only Slurm proves an end: the launcher's process may be invisible to this user, or on another machine.
    """
    if launch.code is None and (job is None or job.is_final):
        return JobStatus("PENDING" if job is None else "RUNNING", JobClass.ACTIVE)
    if job is None:
        reason = f"its launcher has named no job; see {POINT_FILES.launcher_log}"
        return JobStatus(FORGOTTEN, JobClass.UNKNOWN, reason=reason)
    return _naming(job, launch.job_ids[-1])


def _jobs(launch: _LauncherJob) -> list[Job]:
    return [Job("", job_id, "", launch.directory) for job_id in launch.job_ids]


def _naming(job: JobStatus, job_id: str, more: str = "") -> JobStatus:
    """Add the id of the Slurm job to the reason, since the run's id is the launcher's."""
    reason = f"Slurm job {job_id}{more}"
    return replace(job, reason=f"{reason}: {job.reason}" if job.reason else reason)


def _unnamed(status: JobStatus) -> JobStatus:
    """Return a status with Slurm's own reason, without the job's id."""
    return replace(status, reason=status.reason.partition(": ")[2])


class ByLauncher:
    """The embedded loop's scheduler and the upstream launcher's, whose ids differ."""

    def __init__(self, embedded: Scheduler, upstream: Scheduler) -> None:
        self._embedded = embedded
        self._schedulers: Mapping[RunLauncher, Scheduler] = {EMBEDDED: embedded, MEGATRON_BRIDGE: upstream}

    def _split(self, items: Iterable[_T], of: Callable[[_T], RunLauncher]) -> Iterator[tuple[Scheduler, list[_T]]]:
        """Yield each scheduler with its own items, if it has any. of: the launcher of an item."""
        every = list(items)
        for launcher, scheduler in self._schedulers.items():
            if own := [item for item in every if of(item) is launcher]:
                yield scheduler, own

    @property
    def pace(self) -> tuple[float, float, float]:
        return self._embedded.pace

    @property
    def may_be_late(self) -> bool:
        return self._embedded.may_be_late

    def preflight(self) -> None:
        for scheduler in self._schedulers.values():
            scheduler.preflight()

    def batches(self, runs: Sequence[RunPlan]) -> list[tuple[RunPlan, ...]]:
        parts = self._split(runs, lambda run: run.launcher)
        return [batch for scheduler, own in parts for batch in scheduler.batches(own)]

    def submit(self, submission: Submission, root: Path) -> dict[str, str]:
        return self._schedulers[submission.runs[0].launcher].submit(submission, root)

    def find(self, submissions: Iterable[Submission], root: Path) -> dict[str, str]:
        parts = self._split(submissions, lambda submission: submission.runs[0].launcher)
        return {key: job_id for scheduler, own in parts for key, job_id in scheduler.find(own, root).items()}

    def poll(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        parts = self._split(jobs, _launcher_of_job)
        return {key: seen for scheduler, own in parts for key, seen in scheduler.poll(own).items()}

    def observe(self, jobs: Sequence[Job]) -> dict[str, Seen]:
        parts = self._split(jobs, _launcher_of_job)
        return {key: seen for scheduler, own in parts for key, seen in scheduler.observe(own).items()}

    def cancel(self, jobs: Iterable[Job]) -> None:
        for scheduler, own in self._split(jobs, _launcher_of_job):
            scheduler.cancel(own)

    def throttle(self, jobs: Iterable[Job], parallel: int) -> None:
        for scheduler, own in self._split(jobs, _launcher_of_job):
            scheduler.throttle(own, parallel)

    def unhealthy_nodes(self, nodes: str) -> dict[str, str]:
        return self._embedded.unhealthy_nodes(nodes)  # both run on the same nodes

    def num_usable_nodes(self, exclude: Iterable[str]) -> int | None:
        return self._embedded.num_usable_nodes(exclude)

    def may_start(self, run: RunPlan, status: JobStatus) -> bool:
        return self._schedulers[run.launcher].may_start(run, status)

    def exceeded(self, run: RunPlan, status: JobStatus) -> str:
        return self._schedulers[run.launcher].exceeded(run, status)


def _launcher_of_job(job: Job) -> RunLauncher:
    process = process_of(job.job_id)
    return MEGATRON_BRIDGE if process is not None and process.is_launcher else EMBEDDED
