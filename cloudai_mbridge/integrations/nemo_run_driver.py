"""Start one run through NeMo-Run, in a separate process in the run's directory: `python -P -m` this module.

On Slurm its argument is a JSON object of further sbatch options.

Local: waits for the run and exits 0 if it succeeded, else 1. Slurm: prints the id of the submitted job on stdout.
NeMo-Run sets up logging, remembers its home when imported and prints to stdout; none of that reaches mbridge.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cloudai_mbridge.training.process.loopback import loopback_address, use_loopback

HOME = "nemo_run"
CONFIG = "nemo_run.json"
TITLE = "mbridge"
JOB = "task"
SRUN_ARRAY = "mbridge_srun"  # of the batch script: srun's options, each an element


def main() -> int:
    """Run the command in the config file; return the exit code."""
    config = json.loads(Path(CONFIG).read_text(encoding="utf-8"))
    os.environ["NEMORUN_HOME"] = HOME  # relative: NeMo-Run's shell lines must not hold a path
    os.environ.pop("SLURM_PROCID", None)  # with it, NeMo-Run would act as a rank that prepares nothing
    with contextlib.redirect_stdout(sys.stderr):
        try:
            import nemo_run
        except ImportError as error:
            print(f"NeMo-Run cannot be imported ({error}); pip install 'cloudai-mbridge[nemo-run]'", file=sys.stderr)
            return 1
        if config["executor"] == "local":
            return _run_local(nemo_run, config)
        job_id = _submit(nemo_run, config, json.loads(sys.argv[1]))
    if job_id is not None:
        print(job_id)
    return 0 if job_id is not None else 1


def _experiment(nemo_run: Any) -> Any:
    return nemo_run.Experiment(
        TITLE,
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,  # needs sacct, which a cluster may lack
        serialize_metadata_for_scripts=False,
    )


def _run_local(nemo_run: Any, config: dict[str, Any]) -> int:
    """Let NeMo-Run's torchrun start the task once per rank, and wait."""
    pythons = [python for python in (config["python"], sys.executable) if python and os.path.isabs(python)]
    os.environ["PET_LOCAL_ADDR"] = loopback_address()  # torchrun's --local-addr, which NeMo-Run leaves out
    use_loopback()
    os.environ["PATH"] = os.pathsep.join([*map(os.path.dirname, pythons), os.environ.get("PATH", os.defpath)])
    executor = nemo_run.LocalExecutor(launcher="torchrun", ntasks_per_node=config["ranks"], retries=0)
    with _experiment(nemo_run) as experiment:
        experiment.add(nemo_run.Script(path="bash", args=[config["task"]]), executor=executor, name=JOB)
        experiment.run()
    (job,) = experiment.jobs
    for log in sorted(Path(job.executor.job_dir).rglob("stderr.log")):  # torchrun's own output
        sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
    return 0 if job.state.name == "SUCCEEDED" else 1


def _submit(nemo_run: Any, config: dict[str, Any], options: dict[str, str]) -> str | None:
    """Submit held, switch requeueing off, release: NeMo-Run's `sbatch --requeue` beats any directive."""
    executor = nemo_run.SlurmExecutor(
        account=None,  # this and the like are among the parameters
        time=None,
        additional_parameters={**config["sbatch"], **options, "hold": True},
        job_name_prefix=f"{TITLE}-",
        setup_lines=f"source ./{config['setup']}",
        srun_args=[f'"${{{SRUN_ARRAY}[@]}}"'],  # expanded by NeMo-Run's batch script, which does not quote it
        packager=nemo_run.Packager(),
        retries=0,
        poll_estimated_start_time=False,
    )
    try:
        with _experiment(nemo_run) as experiment:
            script = nemo_run.Script(path=f'"$SLURM_SUBMIT_DIR"/{config["task"]}')  # likewise
            experiment.add(script, executor=executor, name=JOB)
            experiment.run(detach=True)
    except Exception as error:  # on any error of NeMo-Run, the run was not submitted; sbatch's message is in the result
        print(getattr(getattr(error, "result", None), "stderr", None) or error, file=sys.stderr)
        return None
    (job,) = experiment.jobs
    app_id: str = job.handle.partition("://")[2].partition("/")[2]
    return app_id if _release(app_id.partition(";")[0]) else None


def _release(job_id: str) -> bool:
    """Release a held job with requeueing off; cancel it if that fails."""
    for argv in (["scontrol", "update", f"JobId={job_id}", "Requeue=0"], ["scontrol", "release", job_id]):
        code, said = _call(argv)
        if code != 0:
            cancelled, _ = _call(["scancel", job_id])
            end = "the job has been cancelled" if cancelled == 0 else f"job {job_id} is held and could not be cancelled"
            print(f"{' '.join(argv)}: {said}; {end}", file=sys.stderr)
            return False
    return True


def _call(argv: list[str]) -> tuple[int, str]:
    """Return the exit code of a command and its error message."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        return 1, str(error)
    return done.returncode, done.stderr.strip()


if __name__ == "__main__":
    sys.exit(main())
