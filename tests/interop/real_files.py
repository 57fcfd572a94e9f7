"""Write files with the real configuration code of Megatron-Bridge: one for each provider of a GPT model.

    python real_files.py LAUNCHER_DIRECTORY OUTPUT_DIRECTORY

Real are the providers, the container and its to_yaml(); what they import besides is not (see `real_presets`).
"""

import ast
import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from real_presets import load_packages

LAUNCHER, OUTPUT = Path(sys.argv[1]), Path(sys.argv[2])
SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}


def providers() -> list[type]:
    """Import every provider whose modules can be imported here."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    root, found = LAUNCHER / "src/megatron/bridge/models", []
    for path in sorted(root.rglob("*_provider.py")):
        module = ".".join(("megatron.bridge.models", *path.relative_to(root).with_suffix("").parts))
        names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
        loaded = importlib.import_module(module)
        classes = [getattr(loaded, name) for name in names]
        found += [cls for cls in classes if isinstance(cls, type) and issubclass(cls, GPTModelProvider)]
    return found


def container(model: Any) -> Any:
    from megatron.bridge.training import config

    return config.ConfigContainer(
        model=model,
        train=config.TrainingConfig(train_iters=10, global_batch_size=8, micro_batch_size=1),
        optimizer=config.OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-4),
        scheduler=config.SchedulerConfig(lr_warmup_iters=2),
        dataset=config.MockGPTDatasetConfig(
            random_seed=1, seq_length=64, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False
        ),
        logger=config.LoggerConfig(),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=512),
        checkpoint=config.CheckpointConfig(),
    )


def main() -> None:
    """Write the files, and what each provider holds beside its base."""
    load_packages(LAUNCHER)
    import torch

    facts = {}
    for cls in providers():
        name = f"{cls.__module__}.{cls.__qualname__}"
        try:
            fields = {each.name: each for each in dataclasses.fields(cls)}
            missing = [key for key in SIZES if fields[key].default in (None, 0, dataclasses.MISSING)]
            model = cls(**{key: SIZES[key] for key in missing})
            container(model).to_yaml(str(OUTPUT / f"{name}.yaml"))
        except Exception as error:  # its own demands: a newer transformers, a description of its layers
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        plain = {key: getattr(model, key) for key in fields if isinstance(getattr(model, key), int | float | str)}
        facts[name] = {"fields": plain}
        if hasattr(model, "scale_factor"):
            from megatron.bridge.models.llama.llama_provider import apply_rope_scaling

            frequencies = 1.0 / (model.rotary_base ** (torch.arange(0, 128, 2) / 128))
            names = ("low_freq_factor", "high_freq_factor", "old_context_len")
            factors = {key: getattr(model, key) for key in names}
            facts[name]["inv_freq"] = apply_rope_scaling(frequencies, factor=model.scale_factor, **factors).tolist()
    (OUTPUT / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
