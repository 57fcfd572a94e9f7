"""Keys of the files without effect, on any run or with one of the launchers: each that is set becomes a note."""

from collections.abc import Collection, Iterator, Mapping

from pydantic import BaseModel

from cloudai_mbridge.models.scenario import TestRun, TestScenario
from cloudai_mbridge.models.system import Executor, LocalSystem, Partition, SlurmSystem, System
from cloudai_mbridge.models.test_definition import GitRepo, TestDefinition, TrainingReportConfig

# Keys of CloudAI's files that nothing here reads
NO_EFFECT: Mapping[type[BaseModel], tuple[str, ...]] = {
    LocalSystem: ("hf_home_path", "data_repository", "reports"),
    SlurmSystem: (
        *("hf_home_path", "data_repository", "reports", "cache_docker_images_locally", "status_retry_pause_seconds"),
        *("group_allocated", "ntasks_per_node"),
    ),
    Partition: ("slurm_nodes",),
    TestScenario: ("job_status_check", "sol_path", "reports"),
    TestRun: ("weight", "sol", "ideal_perf"),
    TestDefinition: ("predictor", "agent_metrics", "agent_reward_function", "agent_config"),
    TrainingReportConfig: ("exclude_post_profiling_steps",),
    GitRepo: ("installed_path",),
}
# Keys of a system that act on the embedded loop alone: Megatron-Bridge's launcher has no option for them
NOT_UPSTREAM = ("python_executable", "distribution", "mpi", "container_mount_home", "job_name_prefix", "executor")
# Keys of a test that act on Megatron-Bridge's launcher alone
NOT_EMBEDDED = ("git_repos", "nemo_run_repo")


def set_without_effect(model: BaseModel, names: Collection[str] | None = None) -> list[str]:
    """Return the keys of a table that are set, to something, of those without effect, or of `names`."""
    names = NO_EFFECT.get(type(model), ()) if names is None else names
    return [name for name in names if name in model.model_fields_set and getattr(model, name) not in (None, [], {})]


def notes_on_keys(where: str, model: BaseModel) -> Iterator[str]:
    """Yield one line for all keys of a table that are set and have no effect."""
    if names := set_without_effect(model):
        verb = "has" if len(names) == 1 else "have"
        yield f"{where}: {', '.join(names)} {verb} no effect"


def not_upstream(system: System) -> Iterator[str]:
    """Yield one line for the keys of a system that do not reach Megatron-Bridge's launcher."""
    given = [name for name in NOT_UPSTREAM if name in system.model_fields_set]
    if names := [name for name in given if getattr(system, name) not in (None, "", False, Executor.MBRIDGE)]:
        verb = "does" if len(names) == 1 else "do"
        what = f"{', '.join(names)} {verb} not reach the upstream launcher, which has no such option"
        yield f"system {system.name!r}: {what}"
