"""Decide everything about one run of one point."""

import os
from collections.abc import Iterable
from typing import Any

from cloudai_mbridge.constraints.megatron.placement import place
from cloudai_mbridge.constraints.rule import Point
from cloudai_mbridge.files.names import slug
from cloudai_mbridge.megatron_bridge.launcher.plan import HF_TOKEN, WANDB_API_KEY
from cloudai_mbridge.megatron_bridge.presets.find import Preset
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.loading.load import LoadedTest
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.models.values.credentials import is_secret_variable
from cloudai_mbridge.models.values.host_paths import absolute_mount
from cloudai_mbridge.models.values.references import expand
from cloudai_mbridge.models.values.time_limit import parse_time_limit
from cloudai_mbridge.plan.launchers import LAUNCHERS, num_steps_of
from cloudai_mbridge.plan.run_plan import RunPlan
from cloudai_mbridge.recipes import Recipe
from cloudai_mbridge.sweep.expand import SweepPoint

# cmd_args that hold a credential -> the variable that hands it to the job
SECRET_VARIABLES = {"hf_token": HF_TOKEN, "wandb_key": WANDB_API_KEY}


def plan_run(
    test: LoadedTest,
    point: SweepPoint,
    args: ResolvedCmdArgs,
    recipe: Recipe | None,
    system: System,
    iteration: int,
    preset: Preset | None = None,
) -> RunPlan:
    """Place a point that breaks no rule, and name everything that it needs.

    args: the point's with the recipe's defaults. preset: the point's, if it has one.
    """
    run, definition, launcher = test.run, test.definition, LAUNCHERS[args.launcher]
    args = launcher.arguments(point, args)
    placement = place(Point(args, system, recipe, launcher.num_nodes(point)))
    env = {name: str(value) for name, value in system.global_env_vars.items()} | dict(point.env)
    env = launcher.variables(args, system) | env
    time_limit = run.time_limit or args.time_limit
    num_steps = num_steps_of(test, args)
    config = launcher.training(test, args, recipe, system)
    recipe_env = launcher.recipe_variables(args, system, preset)
    return RunPlan(
        key=f"{slug(run.id)}/{point.label}/{iteration}",
        test_id=run.id,
        test_name=definition.name,
        label=point.label,
        iteration=iteration,
        coordinates=point.coordinates,
        args=public_args(args),
        recipe=args.model_recipe_name,
        num_nodes=placement.num_nodes,
        ranks_per_node=placement.ranks_per_node,
        num_steps=num_steps,
        warmup_steps=definition.warmup_steps(num_steps),
        training_config=config,
        definition=resolved_definition(definition, point, args),
        env={name: value for name, value in env.items() if not is_secret_variable(name, value)},
        secret_env=_secrets(args, env),
        recipe_env={name: value for name, value in recipe_env.items() if name not in env},
        time_limit=time_limit,
        time_limit_s=parse_time_limit(time_limit),
        nodes=tuple(run.nodes),
        exclude_nodes=tuple(run.exclude_nodes),
        extra_srun_args=run.extra_srun_args or "",
        container_image=args.container_image,
        container_mounts=_mounts(definition, args, launcher.mounts(args)),
        after_completion=_wait_for(run.dependencies, "start_post_comp"),
        after_start=_wait_for(run.dependencies, "start_post_init"),
        end_with=_wait_for(run.dependencies, "end_post_comp"),
        **launcher.fields(test, args, system),
    )


def _wait_for(dependencies: Iterable[Any], kind: str) -> tuple[str, ...]:
    return tuple(dependency.id for dependency in dependencies if dependency.type == kind)


def _mounts(definition: TestDefinition, args: ResolvedCmdArgs, needed: tuple[str, ...]) -> tuple[str, ...]:
    custom = [mount for mount in (args.custom_mounts or "").split(",") if mount]
    return tuple(map(absolute_mount, (*definition.extra_container_mounts, *custom, *needed)))


def _secrets(args: ResolvedCmdArgs, env: dict[str, str]) -> dict[str, str]:
    """Return the values of credentials, with known variables expanded now: no script may contain them."""
    secrets = {name: value for name, value in env.items() if is_secret_variable(name, value)}
    for field, variable in SECRET_VARIABLES.items():
        if value := (getattr(args, field) or "").strip():
            secrets[variable] = value
    known = {**os.environ, **{name: value for name, value in env.items() if name not in secrets}}
    return {name: expand(value, known) for name, value in secrets.items()}


def public_args(args: ResolvedCmdArgs) -> dict[str, Any]:
    """Return the arguments set by user or recipe, without credentials, and the defaults that decide the training."""
    values = args.model_dump(mode="json", exclude_none=True)
    kept = args.model_fields_set | LAUNCHERS[args.launcher].always_shown
    return {name: value for name, value in values.items() if name in kept and name not in SECRET_VARIABLES}


def resolved_definition(definition: TestDefinition, point: SweepPoint, args: ResolvedCmdArgs) -> dict[str, Any]:
    """Return the point as a test definition of its own: no lists, no credentials."""
    env = {name: value for name, value in point.env.items() if not is_secret_variable(name, value)}
    agent = {"agent", "agent_steps", "agent_metrics", "agent_reward_function", "agent_config", "predictor"}
    left_out = {"extra_env_vars", "sweep", *agent}  # credentials; settings of searches only
    dump = definition.model_dump(mode="json", exclude_none=True, exclude_defaults=True, exclude=left_out)
    return {
        **dump,
        "name": f"{definition.name}-{point.label}",
        "test_template_name": definition.test_template_name,
        "cmd_args": public_args(args),
        **({"extra_env_vars": env} if env else {}),
    }
