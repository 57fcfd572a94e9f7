"""An estimate as plain data: the output of `mbridge estimate --json`."""

from dataclasses import asdict
from typing import Any

from cloudai_mbridge.estimate.memory import ParallelLayout
from cloudai_mbridge.estimate.memory.other import GIB
from cloudai_mbridge.estimate.point import PointEstimate
from cloudai_mbridge.estimate.published import PublishedRow

_RATES = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "num_steps", "gpu_hours", "cost", "currency")


def as_data(found: PointEstimate) -> dict[str, Any]:
    """Return the estimate; memory terms in bytes, and in GiB where a name says so."""
    return {
        "recipe": found.recipe,
        "gpu": found.gpu,
        "precision": str(found.layout.precision),
        "layout": _layout(found.layout),
        "flops_formula": str(found.formula),
        "flops_per_token": found.flops_per_token,
        "parameters": asdict(found.parameters) if found.parameters else None,
        "memory": _memory(found),
        "fits": found.fits,
        "tokens_per_step": found.tokens_per_step,
        "step_time_s": found.step_time_s,
        "step_time_terms_s": dict(found.step_time.terms) if found.step_time else None,
        "step_time_median_error": found.held_out_error.median if found.held_out_error else None,
        "step_time_error": str(found.held_out_error) if found.held_out_error else None,
        **{name: getattr(found, name) for name in _RATES},
        "published": [_published(row) for row in found.published],
        "not_considered": list(found.not_considered),
        "filled_in": found.filled_in,
        "missing": dict(found.missing),
    }


def _layout(layout: ParallelLayout) -> dict[str, Any]:
    names = ("num_gpus", "tp", "pp", "cp", "vp", "ep", "expert_tp", "dp", "expert_dp", "mbs", "gbs", "num_microbatches")
    options = ("use_megatron_fsdp", "use_distributed_optimizer", "activation_offload_layers", "cuda_graph")
    recompute = layout.recompute
    return {
        **{name: getattr(layout, name) for name in names},
        "seq_length": layout.seq_length,
        "pipeline_layout": layout.pipeline_layout,
        "sequence_parallel": layout.has_sequence_parallel,
        "recompute": {
            "granularity": str(recompute.granularity),
            "modules": sorted(recompute.modules),
            "method": recompute.method,
            "num_layers": recompute.num_layers,
        },
        **{name: getattr(layout, name) for name in options},
        "implementation": str(layout.implementation),
    }


def _published(row: PublishedRow) -> dict[str, Any]:
    names = ("container", "label", "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu")
    return {**{name: getattr(row, name) for name in names}, "flops_formula": str(row.formula)}


def _memory(found: PointEstimate) -> dict[str, Any] | None:
    if found.peak_memory_gib is None:
        return None
    names = ("estimator", "peak_memory_gib", "gpu_memory_gib")
    head: dict[str, Any] = {**{name: getattr(found, name) for name in names}, "share": found.memory_share}
    if found.reference is not None:
        terms = {"weight_and_optimizer": found.reference.weight_and_optimizer, "activation": found.reference.activation}
        return {**head, "worst_stage": None, "stages": [], "terms": terms, "line": found.reference.line()}
    stages = [
        {
            **{name: getattr(stage, name) for name in ("stage", "parameters", "total")},
            "total_gib": stage.total / GIB,
            "terms": dict(stage.terms),
        }
        for stage in found.stages or ()
    ]
    return {**head, "worst_stage": found.worst_stage.stage if found.worst_stage else None, "stages": stages}
