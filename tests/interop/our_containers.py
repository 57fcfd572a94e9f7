"""Print the container that our loop trains for each preset of a shipped recipe, prepared as on a GPU.

    python our_containers.py < requests.jsonl > containers.jsonl

A request is {"recipe", "gpu", "num_gpus", "args"}, with the arguments of a test; the answer has the file's text as
"yaml" and the variables of the job as "env", or why it is "refused".
"""

import contextlib
import io
import json
import logging
import os
import sys
import warnings
from typing import Any
from unittest import mock

from judge_containers import be_a_gpu, on

STEPS = 50  # as upstream's recipes


def trained(given: dict[str, Any]) -> dict[str, Any]:
    """Return the container and the variables of a preset; what the loop does not have of the preset is left out."""
    from cloudai_mbridge.megatron_bridge.environment import recipe_environment
    from cloudai_mbridge.megatron_bridge.presets import find_preset, with_loop_preset
    from cloudai_mbridge.megatron_bridge.release import Release
    from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
    from cloudai_mbridge.recipes.apply import training_config, with_recipe_defaults
    from cloudai_mbridge.recipes.load import recipe_for
    from cloudai_mbridge.recipes.presets import with_preset_of
    from cloudai_mbridge.training.config.container import ConfigContainer
    from cloudai_mbridge.training.startup.prepare import prepare

    asked = ResolvedCmdArgs(**given)
    preset = find_preset(asked, Release("0.6.0", "shipped"))
    assert preset, given
    recipe = with_preset_of(recipe_for(asked.model_recipe_name, asked.task), preset)
    args = with_recipe_defaults(with_loop_preset(asked, preset).args, recipe)
    args = args.model_copy(update={"config_variant": None, "max_steps": STEPS})
    config = ConfigContainer.from_dict(training_config(recipe, args, {}))
    config.logger.save_config_filepath = None  # its directory may not be there
    env = recipe_environment(args, args.gpu_type, preset)
    with mock.patch.dict(os.environ, env):
        prepare(config)
    return {"yaml": config.to_yaml(), "env": env}


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
                answer = trained(request["args"])
            except (BadInput, ConfigError) as error:
                answer = {"refused": str(error)}
            print(json.dumps({"recipe": request["recipe"], **answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
