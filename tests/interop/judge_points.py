"""Let Megatron-Bridge's launcher decide about points: its dry run makes the container of each and validates it.

    python judge_points.py LAUNCHER_DIRECTORY < points.jsonl > verdicts.jsonl

A point is {"gpu", "num_gpus", "argv"}; a verdict is the message of what refuses it, null where nothing does. Real and
not real is what it is in `real_containers.py`; the container is not written.
"""

import contextlib
import json
import os
import sys
import warnings

from judge_containers import on
from launched_containers import load


def main() -> None:
    """Judge each point."""
    answers, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    warnings.simplefilter("ignore")
    run_script = load()
    import logging

    from megatron.bridge.training.config import ConfigContainer

    logging.disable(logging.CRITICAL)
    ConfigContainer.to_yaml = lambda self, path: None
    ConfigContainer.print_yaml = lambda self: None
    parser = run_script.parse_cli_args()
    before = dict(os.environ)
    for line in sys.stdin:
        point = json.loads(line)
        os.environ.clear()  # a recipe sets variables
        os.environ.update(before)
        on(point["gpu"], point["num_gpus"])
        message = None
        try:
            args, hydra = parser.parse_known_args([*point["argv"], "--dryrun"])
            with contextlib.suppress(SystemExit):
                run_script._run_training(args, hydra)
        except (Exception, SystemExit) as error:
            message = f"{type(error).__name__}: {error}"
        print(json.dumps(message), file=answers, flush=True)


if __name__ == "__main__":
    main()
