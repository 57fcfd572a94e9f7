"""The parts in their order: first what others build on. Budgets leave the ten predictions their time."""

from cloudai_mbridge.gpu_check.kit import Figures, Kit, needs_gpu, needs_known_gpu, needs_transformer_engine
from cloudai_mbridge.gpu_check.outcome import Part
from cloudai_mbridge.gpu_check.parity import REFERENCE, cpu_reference, tiny_bf16, tiny_fp32
from cloudai_mbridge.gpu_check.predictions import PREDICTIONS, predictions
from cloudai_mbridge.gpu_check.proxy import (
    MATMUL,
    PROXY,
    distributed_optimizer,
    matmul,
    proxy,
    without_transformer_engine,
)
from cloudai_mbridge.gpu_check.run_features import checkpoint, line, profile
from cloudai_mbridge.gpu_check.trials import cuda_graphs, fp8


def loop_overhead(kit: Kit) -> Figures:
    """Compare a step of the loop with a bare Megatron-Core step."""
    steps = "6" if kit.device.gpu is None else "21"
    return kit.worker("overhead", "--rounds", "3", "--steps", steps, log="loop_overhead")


_GPU = (needs_gpu,)
PARTS = (
    Part(MATMUL, "measured peak of a bf16 matrix product", 30, matmul, _GPU),
    Part(REFERENCE, "the tiny recipes in fp32 on the CPU", 80, cpu_reference),
    Part("tiny_fp32", "the same on the GPU: loss parity with the CPU", 80, tiny_fp32, _GPU),
    Part(PROXY, "an 8B-shaped model of 4 layers in bf16", 60, proxy, _GPU),
    Part(
        PREDICTIONS,
        "memory and step time, predicted and measured at ten points",
        280,
        predictions,
        (needs_known_gpu,),
    ),
    Part("without_transformer_engine", "the proxy on local layers", 60, without_transformer_engine, _GPU),
    Part("fp8", "the proxy in FP8", 60, fp8, (*_GPU, needs_transformer_engine)),
    Part("cuda_graphs", "the proxy with CUDA graphs of each layer", 60, cuda_graphs, _GPU),
    Part("distributed_optimizer", "with it and without it: the same losses", 80, distributed_optimizer),
    Part("checkpoint", "save, resume, the same losses", 80, checkpoint),
    Part("loop_overhead", "the loop against a bare Megatron-Core step", 90, loop_overhead),
    Part("tiny_bf16", "the tiny recipes on the GPU in bf16", 80, tiny_bf16, _GPU),
    Part("profile", "a trace, and a snapshot of the GPU's memory", 60, profile),
    Part("line", "verify, plan, run, report, promote, gate", 180, line),
)
