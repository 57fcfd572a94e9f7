import math

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import Precision, find_gpu, gpu_named, gpus, mfu, precision_named
from tests.cases import every
from tests.golden import Sentence

ACCELERATORS = ("a100", "h100", "h200", "b200", "b300", "gb200", "gb300")


def test_knows_the_gpus_and_the_processor() -> None:
    assert set(gpus()) == {*ACCELERATORS, "cpu"}


@every("name", ACCELERATORS)
def test_every_gpu_has_its_figures_and_their_source(name: str) -> None:
    gpu = gpus()[name]
    figures = (gpu.memory_gib, gpu.memory_bandwidth_gb_s, gpu.nvlink_gb_s, gpu.nic_gb_s, gpu.exp_per_s, gpu.power_w)
    assert all(figure is not None and figure > 0 for figure in figures)
    assert "NVIDIA" in gpu.source
    assert gpu.nvlink_domain == (72 if name.startswith("gb") else 8)
    assert gpu.gpus_per_node == (4 if name.startswith("gb") else 8)


@every("name", ACCELERATORS)
def test_fewer_bits_are_never_slower(name: str) -> None:
    peaks = [gpus()[name].peak_tflops.get(kind) for kind in ("fp32", "tf32", "bf16", "fp8", "fp4")]
    known = [peak for peak in peaks if peak is not None]
    assert known == sorted(known)
    assert None not in peaks[:3]


@every(
    ("name", "precision", "peak"),
    [
        ("h100", Precision.BF16, 989.4),
        ("h100", Precision.FP8_CS, 1978.9),
        ("gb200", Precision.BF16, 2500),
        ("gb200", Precision.FP8_MX, 5000),
        ("gb300", Precision.NVFP4, 15000),
        ("a100", Precision.TF32, 156),
    ],
)
def test_peaks_are_dense(name: str, precision: Precision, peak: float) -> None:
    assert gpus()[name].peak(precision) == peak


@every("name", ["a100", "h100", "h200"])
def test_older_gpus_do_not_compute_in_four_bits(name: str) -> None:
    assert gpus()[name].peak(Precision.NVFP4) is None


@every(
    ("name", "found"),
    [
        ("gb200", "gb200"),
        ("DGX-GB300", "gb300"),
        (" H100 ", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("local", "cpu"),
    ],
)
def test_finds_the_gpu_of_a_name(name: str, found: str) -> None:
    assert gpu_named(name).name == found


@every("name", ["", "mi300x", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-40GB", "nvidia"])
def test_finds_no_figures_for_another_machine(name: str) -> None:
    assert find_gpu(name) is None


def test_unknown_gpu_is_one_line_that_lists_the_known(sentence: Sentence) -> None:
    with pytest.raises(BadInput) as error:
        gpu_named("mi300x")
    sentence(error)


@every(
    ("name", "precision"),
    [
        ("bf16", Precision.BF16),
        ("BF16", Precision.BF16),
        ("fp8_mx", Precision.FP8_MX),
        ("FP8-MX", Precision.FP8_MX),
        ("MXFP8", Precision.FP8_MX),
        ("FP8", Precision.FP8_CS),
        ("FP8-CS", Precision.FP8_CS),
        ("NVFP4", Precision.NVFP4),
    ],
)
def test_names_of_precisions(name: str, precision: Precision) -> None:
    assert precision_named(name) is precision


def test_unknown_precision_lists_the_known(sentence: Sentence) -> None:
    with pytest.raises(BadInput, match=r"compute_dtype:") as caught:
        precision_named("int8")
    sentence(caught)


def test_mfu_is_the_share_of_the_dense_peak() -> None:
    assert mfu(2000.0, gpu_named("gb200"), Precision.FP8_MX) == 0.4
    utilisation = mfu(744.0, gpu_named("h100"), Precision.FP8_CS)
    assert utilisation is not None
    assert math.isclose(utilisation, 0.376, rel_tol=1e-3)


def test_there_is_no_mfu_without_a_peak() -> None:
    assert mfu(1.0, gpu_named("cpu"), Precision.BF16) is None
    assert mfu(1.0, gpu_named("h100"), Precision.NVFP4) is None


def test_a_processor_claims_nothing() -> None:
    cpu = gpu_named("cpu")
    assert not cpu.is_known
    assert (cpu.memory_gib, cpu.memory_bandwidth_gb_s, cpu.nvlink_gb_s) == (None, None, None)


def test_a_gpu_can_be_a_key() -> None:
    assert {gpu_named("h100"): 1}[gpu_named("DGX-H100")] == 1


def test_block_scaled_numbers_came_with_four_bit_ones() -> None:
    for name, gpu in gpus().items():
        assert (gpu.peak(Precision.FP8_MX) is None) == (gpu.peak(Precision.NVFP4) is None), name
    assert gpu_named("h200").peak(Precision.FP8_CS) is not None


@every("name", ["cpu", "CPU Intel(R) Xeon(R) Processor (1 threads per rank)", "local"])
def test_a_processor_is_a_processor(name: str) -> None:
    assert find_gpu(name) == gpu_named("cpu")
