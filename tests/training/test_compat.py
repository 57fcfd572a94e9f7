"""What differs between releases of Megatron-Core gives one result on each."""

import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import every
from tests.golden import Sentence
from tests.training.conftest import run_ranks

pytest.importorskip("torch")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns while it is imported
    from cloudai_mbridge.training.compat import cuda_graphs
    from cloudai_mbridge.training.compat.batches import batch_size_calculator, check_ramp, samples_after, steps_of_ramp
    from cloudai_mbridge.training.compat.models import build_null_tokenizer
    from cloudai_mbridge.training.compat.versions import RELEASES, TESTED, installed_release, why_unsupported
    from cloudai_mbridge.training.errors import ConfigError
    from cloudai_mbridge.training.models.gpt_provider import GPTModelProvider


@every("found", [*TESTED.values(), "0.19.3", "0.16.2", "0.17.1+5c2fd31"])
def test_a_tested_release_is_supported(found: str) -> None:
    assert why_unsupported(found) is None


@every("found", ["0.15.3", "0.16.0", "0.17.0", "0.18.1", "0.19.3rc1", "0.20.0", "1.0", "of unknown version"])
def test_any_other_is_refused_in_one_line(found: str) -> None:
    reason = why_unsupported(found)
    tested = "0.16.1, 0.17.1, 0.18.2 or 0.19.2"
    assert reason == f"megatron-core {found} is not supported; install {tested}, or a later patch of one of them"


def test_the_installed_release_is_among_the_tested() -> None:
    assert installed_release() in RELEASES


@pytest.mark.process
@pytest.mark.parametrize(("beside", "is_refused"), [("0.4.1", True), ("0.6.0", False)])
def test_a_package_beside_which_megatron_core_cannot_be_imported(beside: str, is_refused: bool, tmp_path: Path) -> None:
    """nvidia-resiliency-ext 0.4.1 has no `__version__`, and Megatron-Core asserts it since 0.17."""
    core = tmp_path / "megatron/core"
    (core / "dist_checkpointing/strategies").mkdir(parents=True)
    (core / "__init__.py").write_text("raise AttributeError('__version__')\n")
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 2\nPRE_RELEASE = ''\n")
    (core / "dist_checkpointing/strategies/nvrx.py").write_text('NVRX_MIN_VERSION = "0.6.0"\n')
    metadata = tmp_path / f"nvidia_resiliency_ext-{beside}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-resiliency-ext\nVersion: {beside}\n")
    done = subprocess.run(
        [sys.executable, "-m", "cloudai_mbridge.training", "--config", "none.yaml"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )
    words = "megatron-core 0.19.2 cannot be imported with nvidia-resiliency-ext 0.4.1; install 0.6.0 or newer of it"
    assert (f"error: {words}, or uninstall it\n" == done.stderr) is is_refused


@pytest.mark.process
@pytest.mark.parametrize(
    ("info", "version"),
    [("MAJOR = 0\nMINOR = 20\nPATCH = 0\nPRE_RELEASE = 'rc1'\n", "0.20.0rc1"), ("x = 1\n", "of unknown version")],
)
def test_a_clone_on_the_path_is_the_one_that_counts(info: str, version: str, tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text(info)
    code = "from cloudai_mbridge.training.compat.versions import installed_version; print(installed_version())"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == version


def _sizes(ramp: list[int] | None, at: list[int]) -> list[int]:
    train = SimpleNamespace(global_batch_size=16, decrease_batch_size_if_needed=False)
    calculator = batch_size_calculator(train, ramp, 2, 2)
    found = []
    for consumed in at:
        calculator.update(consumed, False)
        found.append(calculator.get() * 4)
    return found


def test_a_ramp_of_the_batch_size_is_the_same_in_every_release() -> None:
    assert _sizes([4, 4, 100], [0, 33, 34, 66, 67, 99, 100, 101]) == [4, 4, 8, 8, 12, 12, 16, 16]
    assert _sizes(None, [0, 1000]) == [16, 16]
    assert steps_of_ramp([4, 4, 100], 16) == "0:4 34:8 67:12 100:16"
    assert steps_of_ramp([16, 4, 100], 16) == "0:16"


@every("ramp", [None, [4, 4, 100], [4, 4, 101], [8, 8, 7], [16, 4, 100], [4, 4, 4]])
def test_samples_of_a_ramp_are_those_that_its_steps_consume(ramp: list[int] | None) -> None:
    train: Any = SimpleNamespace(global_batch_size=16, micro_batch_size=2, decrease_batch_size_if_needed=False)
    train.rampup_batch_size = ramp
    calculator = batch_size_calculator(train, ramp, 2, 2)
    consumed = 0
    for iterations in range(40):
        assert samples_after(iterations, train, 2) == consumed
        calculator.update(consumed, False)
        consumed += calculator.get() * 4


def test_a_ramp_shorter_than_its_steps_leaves_sizes_out() -> None:
    train = SimpleNamespace(global_batch_size=16, micro_batch_size=1, decrease_batch_size_if_needed=False)
    train.rampup_batch_size = [1, 1, 6]
    check_ramp(train, 1)
    calculator = batch_size_calculator(train, train.rampup_batch_size, 1, 1)
    found = []
    for consumed in (0, 1, 2, 3, 6, 7):
        calculator.update(consumed, False)
        found.append(calculator.get())
    assert found == [1, 3, 6, 8, 16, 16]


@every("ramp", [[4, 5, 100], [32, 4, 100], [4, 0, 100], [4, 4, 0], [4, 4], [6, 2, 100], [4, 2, 100]])
def test_a_ramp_that_misses_the_global_batch_size_is_refused(sentence: Sentence, ramp: list[int]) -> None:
    train = SimpleNamespace(
        global_batch_size=16, micro_batch_size=2, rampup_batch_size=ramp, decrease_batch_size_if_needed=False
    )
    with pytest.raises(ConfigError) as caught:
        check_ramp(train, 2)
    sentence(caught)


def test_the_end_of_a_document_is_the_last_id_in_every_release() -> None:
    tokenizer = build_null_tokenizer(512, {})
    assert (tokenizer.vocab_size, tokenizer.eod) == (512, 511)


def _provider(**values: Any) -> GPTModelProvider:
    return GPTModelProvider(num_layers=2, hidden_size=8, num_attention_heads=2, transformer_impl="local", **values)


@pytest.mark.parametrize(
    ("scope", "names"), [(None, set()), ("full", set()), ("attn", {"attn"}), (["attn", "mlp"], {"attn", "mlp"})]
)
def test_the_old_name_of_what_graphs_capture(scope: Any, names: set[str], recwarn: pytest.WarningsRecorder) -> None:
    provider = _provider(cuda_graph_impl="transformer_engine", cuda_graph_scope=scope)
    cuda_graphs.use_new_names(provider)
    assert cuda_graphs.captured(provider) == names
    assert not [each for each in recwarn if "deprecated" in str(each.message)]


def test_a_full_iteration_in_the_words_of_any_release() -> None:
    provider = _provider(cuda_graph_impl="local", cuda_graph_scope="full_iteration")
    assert cuda_graphs.captures_full_iteration(provider)
    cuda_graphs.use_new_names(provider)
    assert cuda_graphs.captures_full_iteration(provider)
    assert (provider.cuda_graph_impl == "full_iteration") == cuda_graphs.HAS_NEW_NAMES


def test_a_ramp_that_shrinks_is_refused_where_megatron_cannot() -> None:
    train = SimpleNamespace(
        global_batch_size=16, micro_batch_size=2, rampup_batch_size=[4, 4, 100], decrease_batch_size_if_needed=True
    )
    if installed_release() in ("0.16", "0.17"):
        check_ramp(train, 2)
        assert batch_size_calculator(train, [4, 4, 100], 2, 2).get() == 1
        return
    with pytest.raises(ConfigError, match=r"needs Megatron-Core 0\.17 or older"):
        check_ramp(train, 2)


WORKER = """
if __name__ == "__main__":
    import time
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
    from cloudai_mbridge.training.compat.checkpoints import abandon_saves

    dist.init_process_group("gloo", init_method="file://{path}", rank=0, world_size=1)
    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(AsyncRequest(time.sleep, (100000,), []))
    abandon_saves(queue)
    dist.destroy_process_group()
    raise SystemExit("training failed")
"""


@pytest.mark.process
def test_a_run_that_fails_does_not_wait_for_its_writer(tmp_path: Path) -> None:
    """The worker that writes checkpoints beside a GPU has not finished; the process ends all the same."""
    (tmp_path / "script.py").write_text(WORKER.format(path=tmp_path / "group"))
    done = run_ranks(1, ["script.py"], tmp_path, code=1)
    assert "training failed" in done.stderr


def test_grouped_experts_are_sequential_on_a_cpu(train: Any) -> None:
    """0.16 needs a CUDA package for them."""
    model = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "num_layers": 2}
    grouped, sequential = (
        train(1, {"model": {**model, "moe_grouped_gemm": is_grouped}}, "train.train_iters=2").losses
        for is_grouped in (True, False)
    )
    assert len(grouped) == 2
    assert grouped == sequential


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="Transformer Engine is installed")
def test_experts_on_a_gpu_without_transformer_engine(ranks: Any) -> None:
    """Nothing is replaced there, but the router needs a name that 0.16 leaves undefined."""
    done = ranks(1, _A_GPU_WITHOUT_TRANSFORMER_ENGINE)
    assert done.stdout == "(3, 4)\n"


_A_GPU_WITHOUT_TRANSFORMER_ENGINE = """
    import torch

    from cloudai_mbridge.training import cpu

    torch.cuda.is_available = lambda: True
    assert not cpu.install()
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    assert moe_utils.maybe_move_tensor_to_cpu.__module__ == moe_utils.__name__, "it was replaced"
    assert not multi_latent_attention.HAVE_TE
    tokens, weight = (torch.randn(rows, 8, requires_grad=True) for rows in (3, 4))
    logits = moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
    logits.sum().backward()
    print(tuple(logits.shape))
"""
