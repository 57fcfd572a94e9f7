"""Let the dry run of Megatron-Bridge's launcher write the container that it would train, as on a GPU.

    python launched_containers.py LAUNCHER_DIRECTORY < requests.jsonl > containers.jsonl

A request is {"recipe", "gpu", "num_gpus", "argv"}; the answer has the file's text as "yaml", and as "unset" the fields
that have their classes' own values; or why it is "refused". Real and not real is what it is in `real_containers.py`.
"""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from absent_packages import OTHERS, stand_in_for
from judge_containers import be_a_gpu, on
from real_presets import LAUNCHER


def load() -> Any:
    """Import the launcher; return its `run_script`."""
    paths = ("src", "scripts/performance", "scripts/common")
    sys.path[:0] = [str(LAUNCHER / path) for path in paths]
    os.environ["NEMO_HOME"] = tempfile.gettempdir()
    be_a_gpu()
    stand_in_for(OTHERS)
    from real_containers import stand_in_for_models

    stand_in_for_models()
    import run_script

    return run_script


def main() -> None:
    """Answer each request."""
    answers, sys.stdout = sys.stdout, sys.stderr
    run_script = load()
    from megatron.bridge.training.config import ConfigContainer
    from real_containers import unset

    seen: list[Any] = []
    write = ConfigContainer.to_yaml
    ConfigContainer.to_yaml = lambda self, path: (seen.append(self), write(self, path))
    ConfigContainer.print_yaml = lambda self: None
    parser = run_script.parse_cli_args()
    file = Path(tempfile.mkdtemp()) / "container.yaml"
    before = dict(os.environ)
    for line in sys.stdin:
        request = json.loads(line)
        os.environ.clear()  # a recipe sets variables
        os.environ.update(before)
        on(request["gpu"], request["num_gpus"])
        args, hydra = parser.parse_known_args([*request["argv"], "--dryrun", "--save_config_filepath", str(file)])
        try:
            with contextlib.suppress(SystemExit):
                run_script._run_training(args, hydra)
            answer = {"yaml": file.read_text(encoding="utf-8"), "unset": unset(seen.pop())}
            file.unlink()
        except (AssertionError, ValueError) as error:
            answer = {"refused": f"{type(error).__name__}: {error}"}
        print(json.dumps({"recipe": request["recipe"], **answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
