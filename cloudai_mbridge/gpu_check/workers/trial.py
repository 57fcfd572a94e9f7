"""Train a configuration although the loop refuses a field of it: to find out whether it could be allowed.

    python -m cloudai_mbridge.gpu_check.workers.trial --lift model.cuda_graph_impl CONFIG section.field=value ...

Only for the kit: what the refusal says holds for every other run. Prints the loop's own log lines.
"""

import argparse
from pathlib import Path

GRAPHS_MARK = "GRAPHS_CREATED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--lift", action="append", default=[], help="a field that the loop refuses")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    from cloudai_mbridge.training.config import ConfigContainer
    from cloudai_mbridge.training.config.text.overrides import apply_overrides
    from cloudai_mbridge.training.gpt_step import forward_step
    from cloudai_mbridge.training.pretrain import pretrain
    from cloudai_mbridge.training.schema import not_done

    for field in args.lift:
        not_done.ASKS_FOR_NOTHING.pop(field, None)
    config = apply_overrides(ConfigContainer.from_yaml(args.config), args.overrides)
    if getattr(config.model, "cuda_graph_impl", None) not in (None, "none"):
        _use_graph_safe_generators()
    pretrain(config, forward_step)
    print(GRAPHS_MARK, str(_graphs_created()).lower())


def _graphs_created() -> bool:
    """Return whether Megatron-Core has captured CUDA graphs: it falls back to running without."""
    from megatron.core.transformer import cuda_graphs

    return bool(getattr(cuda_graphs._CudagraphGlobalRecord, "cudagraph_created", False))


def _use_graph_safe_generators() -> None:
    """Make random states that CUDA graphs may capture; the loop then finds them made.

    Transformer Engine's attention takes its own tracker only ("Unsupported RNG states tracker").
    """
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    from cloudai_mbridge.training.models.layer_specs import has_transformer_engine

    has_te = has_transformer_engine()
    initialize_rng_tracker(use_te_rng_tracker=has_te, use_cudagraphable_rng=not has_te)


if __name__ == "__main__":
    main()
