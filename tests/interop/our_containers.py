"""Print the container that our loop trains for each preset of a shipped recipe, prepared as on a GPU.

    python our_containers.py < requests.jsonl > containers.jsonl

A request is {"recipe", "gpu", "num_gpus", "args"}, with the arguments of a test; the answer has "yaml", or "refused".
"""

import contextlib
import io
import json
import logging
import re
import sys
import warnings
from typing import Any

from judge_containers import be_a_gpu, on

STEPS = 50  # as upstream's recipes


def container_of(given: dict[str, Any]) -> str:
    """Return the container of a preset as YAML; what the loop does not have of the preset is left out."""
    from cloudai_mbridge.megatron_bridge.presets.find import UPSTREAM_DECIDES, find_preset, with_preset
    from cloudai_mbridge.megatron_bridge.release import Release
    from cloudai_mbridge.models.cmd_args import ARGUMENTS, ResolvedCmdArgs
    from cloudai_mbridge.recipes.apply import training_config, with_recipe_defaults
    from cloudai_mbridge.recipes.load import load_recipe
    from cloudai_mbridge.training.config.container import ConfigContainer
    from cloudai_mbridge.training.startup.prepare import prepare

    asked = ResolvedCmdArgs(**given)
    preset = find_preset(asked, Release("0.6.0", "shipped"))
    assert preset, given
    filled = with_preset(asked, preset).args
    sizes = {name: getattr(filled, name) for name in UPSTREAM_DECIDES if ARGUMENTS[name].config}
    sizes["ep"] = None if sizes["ep"] == 1 else sizes["ep"]
    if layout := sizes["pipeline_model_parallel_layout"]:
        sizes["pipeline_model_parallel_layout"] = re.sub(r"m(\*\d+)?", "", layout)  # the loop trains without
    recipe = load_recipe(asked.model_recipe_name)
    args = asked.model_copy(update={**sizes, "compute_dtype": "bf16", "config_variant": None, "max_steps": STEPS})
    config = ConfigContainer.from_dict(training_config(recipe, with_recipe_defaults(args, recipe), {}))
    config.logger.save_config_filepath = None  # its directory may not be there
    prepare(config)
    return config.to_yaml()


def main() -> None:
    """Answer each request."""
    be_a_gpu()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    from cloudai_mbridge.errors import BadInput
    from cloudai_mbridge.training.errors import ConfigError

    answers = sys.stdout
    with contextlib.redirect_stdout(io.StringIO()):
        for line in sys.stdin:
            request = json.loads(line)
            on(request["gpu"], request["num_gpus"])
            try:
                answer = {"yaml": container_of(request["args"])}
            except (BadInput, ConfigError) as error:
                answer = {"refused": str(error)}
            print(json.dumps({"recipe": request["recipe"], **answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
