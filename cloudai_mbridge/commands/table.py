"""All commands by section: module and line of help. Help and completion import none of them."""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, cast

import click
from click.shell_completion import CompletionItem

from cloudai_mbridge.start_up import leaving_at_once

SECTIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "First steps": {
        "init": ("commands.setup.init:init", "Write a test, a scenario and a system that run as they are."),
        "list": ("commands.plan.list_known:list_", "List the recipes and the rules."),
        "rule": ("commands.plan.list_known:rule", "Explain rules, with examples."),
        "schema": ("commands.setup.schema:schema", "Print the JSON Schema of a TOML file, or of --json."),
        "install": ("install.commands:install", "Install what tests of the upstream launcher need."),
        "uninstall": ("install.commands:uninstall", "Remove what install has installed."),
    },
    "Plan": {
        "verify-configs": ("commands.plan.verify:verify_configs", "Check TOML files without running anything."),
        "dry-run": ("commands.plan.dry_run:dry_run", "Write the files that run would submit."),
        "rehearse": ("commands.plan.rehearse:rehearse", "Build the ranks of every point without a GPU."),
        "sweep": ("commands.plan.sweep:sweep", "Look at the points of a scenario, one or all."),
        "estimate": ("commands.plan.estimate:estimate", "Estimate one point: FLOPs, memory, step time, cost."),
        "tune": ("commands.plan.tune:tune", "Find the fastest layout of a model on a number of GPUs."),
        "calibrate": ("commands.plan.calibrate:calibrate", "Fit the predictions to results of this cluster."),
        "proxy": ("commands.plan.estimate:proxy", "Shrink a recipe to fewer layers of the same shapes."),
    },
    "Run": {
        "run": ("commands.run.drive:run", "Check, submit, watch and report all points of a scenario."),
        "watch": ("commands.run.watch:watch", "Watch a run, whichever process holds it."),
        "resume": ("commands.run.drive:resume", "Continue a run whose mbridge process has ended."),
        "cancel": ("commands.run.drive:cancel", "Cancel everything that a run has submitted."),
        "status": ("commands.run.status:status", "Show where the points of a run stand."),
        "logs": ("commands.run.status:logs", "Print or follow the log of a point."),
    },
    "Results": {
        "runs": ("commands.run.status:runs", "List runs, newest first."),
        "show": ("commands.run.results:show", "Show every point of a run, or all about one."),
        "generate-report": ("commands.run.results:generate_report", "Judge a run again and rewrite its reports."),
        "export": ("commands.run.results:export", "Write results to csv, parquet, MLflow, W&B or a dashboard."),
        "gate": ("commands.gate.gate:gate", "Judge results against a baseline; fail on a regression."),
        "compare": ("commands.gate.gate:compare", "Compare the results of two runs."),
        "baseline": ("commands.gate.baseline:baseline", "Promote good runs to a baseline, and show it."),
        "history": ("commands.gate.history:history", "Keep the results of all runs; find where levels changed."),
        "nodes": ("commands.gate.nodes:nodes", "Find slow nodes."),
    },
}
_COMMANDS = {name: command for section in SECTIONS.values() for name, command in section.items()}


class CommandTable(click.Group):
    """A group of the commands above, each imported when it is called."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:  # click exits with 1, which means that a point failed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        gc.disable()  # imported objects stay: a garbage collection over them takes a tenth of the time
        try:
            with leaving_at_once():
                return cast(click.Command, getattr(importlib.import_module(f"cloudai_mbridge.{module}"), name))
        finally:
            gc.freeze()
            gc.enable()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            raise click.exceptions.NoSuchCommand(error.command_name, possibilities=_COMMANDS, ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _COMMANDS))
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, (_, text) in section.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [name for name in _COMMANDS if name.startswith(incomplete)]
        return [
            *(CompletionItem(name, help=_COMMANDS[name][1]) for name in names),
            *click.Command.shell_complete(self, ctx, incomplete),
        ]
