"""Read containers as our loop would on a GPU with Transformer Engine, and print what it refuses of each.

    python judge_containers.py < containers.jsonl > verdicts.jsonl

A verdict is {"recipe", "gpu", "message", "needs", "prepared"}: why the loop refuses it, null where it does not, all
fields for which it would, and the prepared container. Real are our reader and `prepare`; there are no GPU and no
kernels.
"""

import contextlib
import io
import json
import logging
import os
import re
import sys
import typing
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from absent_packages import KERNELS, stand_in_for

TRANSFORMER_ENGINE = "2.20.2"
PACKAGES = (
    *(*KERNELS, "transformer_engine", "transformer_engine_torch", "deep_ep", "mamba_ssm", "causal_conv1d", "fla"),
    *("fast_hadamard_transform", "datasets", "cudnn", "flash_mla"),
    "fused_weight_gradient_mlp_cuda",  # of Apex, which upstream's image has
)
_REFUSED = re.compile(r"(?:this yet: |; )((?:model|dataset) = \w+|[a-z_0-9.]+)(?: = | \()")
# What sets the field on the model
_SET_BY = {"model.overlap_moe_expert_parallel_comm": "comm_overlap.overlap_moe_expert_parallel_comm"}
# Where a container has a class that cannot be read, what is read instead, to see what else there is
_MODEL = "megatron.bridge.models.gpt_provider.GPTModelProvider"
_DATASET = {"_target_": "MockGPTDatasetConfig", "random_seed": 1, "reset_position_ids": False}
_DATASET |= {"reset_attention_mask": False, "eod_mask_loss": False}


def be_a_gpu() -> None:
    """Let Megatron-Core and our code find a GPU, Transformer Engine and what dispatchers need."""
    torch.compile = lambda model=None, **keywords: model if model is not None else (lambda one: one)
    typing.override = getattr(typing, "override", lambda one: one)  # Python 3.12
    stand_in_for(PACKAGES)
    import megatron.core.utils
    from packaging.version import Version

    megatron.core.utils._te_version = Version(TRANSFORMER_ENGINE)
    import megatron.core.models.gpt.gpt_layer_specs

    stand_in_for(("emerging_optimizers",))  # Megatron-Core looks into it

    class FusedAdam:
        """What Megatron-Core looks at: the arguments of Transformer Engine's."""

        def __init__(self, master_weight_dtype=0, exp_avg_dtype=0, exp_avg_sq_dtype=0, use_decoupled_grad=0): ...

    import transformer_engine.pytorch.optimizers

    transformer_engine.pytorch.optimizers.FusedAdam = FusedAdam
    torch.cuda.is_available = lambda: True


def on(gpu: str, num_gpus: int) -> None:
    """Be one of so many GPUs of this kind."""
    major = 9 if gpu == "h100" else 10
    device = SimpleNamespace(major=major, minor=0, name=f"NVIDIA {gpu.upper()}")
    torch.cuda.get_device_properties = lambda *args: device
    torch.cuda.get_device_capability = lambda *args: (major, 0)
    os.environ["WORLD_SIZE"] = str(num_gpus)


def read_and_prepare(data: dict[str, Any]) -> Any:
    """Return the configuration as the loop would train it. Raises ConfigError."""
    from cloudai_mbridge.training.config.container import ConfigContainer
    from cloudai_mbridge.training.startup import prepare

    config = ConfigContainer.from_dict(data)
    prepare.prepare(config)
    return config


def needs_of(data: dict[str, Any]) -> list[str]:
    """Return every field for which a container is refused, in the order in which it is found; `data` is changed."""
    from cloudai_mbridge.training.errors import ConfigError
    from cloudai_mbridge.training.startup import prepare

    found: dict[str, None] = {}
    refuse = prepare.refuse_unsupported

    def note(config: Any) -> None:
        try:
            refuse(config)
        except ConfigError as error:
            found.update((_SET_BY.get(name, name), None) for name in _REFUSED.findall(str(error)))

    prepare.refuse_unsupported = note
    try:
        for _ in range(50):
            try:
                note(_with_precision_and_overlap(data))
                read_and_prepare(data)
            except ConfigError as error:
                if not (changed := _without(data, str(error).split(": ")[0])):
                    return list(found) or [str(error)]
                found[changed] = None
            else:
                return list(found)
    finally:
        prepare.refuse_unsupported = refuse
    raise AssertionError(f"no end of refusals: {list(found)}")


def _with_precision_and_overlap(data: dict[str, Any]) -> Any:
    """Return the configuration with what these two sections set elsewhere, whichever rules it breaks."""
    from cloudai_mbridge.training.config.container import ConfigContainer
    from cloudai_mbridge.training.mixed_precision import get_mixed_precision_config

    config = ConfigContainer.from_dict(data)
    get_mixed_precision_config(config.mixed_precision).setup(config.model, config.optimizer, config.ddp)
    if config.comm_overlap is None:
        return config
    with contextlib.suppress(AssertionError):
        config.set_data_parallel_size()
        config.comm_overlap.finalize()
        config.comm_overlap.setup(config.model, config.optimizer, config.ddp)
    return config


def _without(data: dict[str, Any], where: str) -> str:
    """Take a field that cannot be read out of a container, and return its name; "" where there is none."""
    section, _, field = where.removesuffix("._target_").partition(".")
    if section not in data or (field and not isinstance(data[section], dict)):
        return ""
    value = data[section] if not field else data[section].get(field.partition(".")[0].partition("[")[0])
    kind = value["_target_"].rpartition(".")[2] if isinstance(value, dict) and "_target_" in value else ""
    if section == "model" and not field:
        data["model"]["_target_"] = _MODEL
    elif section == "dataset":
        data["dataset"] = {**_DATASET, "sequence_length": data["model"]["seq_length"]}
        return f"dataset = {kind}"
    elif field:
        name = field.partition(".")[0].partition("[")[0]
        if name not in data[section]:
            return ""
        del data[section][name]
        return f"{section}.{name}"
    else:
        del data[section]
    return f"{section} = {kind}"


def verdicts(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the verdict on each container."""
    from cloudai_mbridge.training.config.text.yaml_text import parse_yaml
    from cloudai_mbridge.training.errors import ConfigError

    for line in lines:
        given = json.loads(line)
        on(given["gpu"], given["num_gpus"])
        message, needs, prepared = None, [], None
        try:
            prepared = read_and_prepare(data := parse_yaml(given["yaml"])).to_yaml()
        except ConfigError as error:
            message, needs = str(error), needs_of(data)
        yield {"recipe": given["recipe"], "gpu": given["gpu"], "message": message, "needs": needs, "prepared": prepared}


def main() -> None:
    """Judge each container."""
    be_a_gpu()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    answers = sys.stdout
    with contextlib.redirect_stdout(io.StringIO()):
        for verdict in verdicts(sys.stdin):
            print(json.dumps(verdict), file=answers, flush=True)


if __name__ == "__main__":
    main()
