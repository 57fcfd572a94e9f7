"""The weights that a model starts with, and what Transformer Engine keeps beside those in FP8."""

from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cloudai_mbridge.training.models import initialization  # noqa: E402

Layout = Callable[..., SimpleNamespace]
CONFIG = SimpleNamespace(
    gated_linear_unit=False, init_method_std=0.02, num_layers=2, use_cpu_initialization=True, num_moe_experts=None
)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("world_size", 1), ("rank", 0)):
        monkeypatch.setattr(initialization.mpu, f"get_tensor_model_parallel_{name}", lambda value=value: value)


def model(kept: "torch.Tensor | None") -> "torch.nn.Linear":
    """Return a model whose weight keeps the values of high precision that it was made with, as one in FP8 does."""
    made = torch.nn.Linear(8, 4)
    made.weight._kept = kept
    made.weight.get_high_precision_init_val = MethodType(lambda self: self._kept, made.weight)
    return made


def test_the_optimizer_starts_from_the_same_weights() -> None:
    made = model(torch.ones(4, 8, dtype=torch.bfloat16))
    initialization.initialize_weights(made, CONFIG, seed=1)
    kept = made.weight.get_high_precision_init_val()
    assert kept.dtype is torch.bfloat16
    assert torch.equal(kept, made.weight.detach().bfloat16())
    assert 0.01 < made.weight.std() < 0.04


def test_values_that_are_not_kept_any_more() -> None:
    made = model(None)
    initialization.initialize_weights(made, CONFIG, seed=1)
    assert 0.01 < made.weight.std() < 0.04


EXPERTS = SimpleNamespace(
    gated_linear_unit=True,
    init_method_std=0.02,
    num_layers=2,
    use_cpu_initialization=True,
    num_moe_experts=4,
    expert_model_parallel_size=1,
)
WIDTH, HIDDEN = 8, 6
WHOLE = {"fc1": (2 * WIDTH, HIDDEN), "fc2": (HIDDEN, WIDTH)}


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> Layout:
    """Stand for a rank of a layout: layout(ep=(2, 1)) is rank 1 of 2. Returns the model's configuration."""

    def set_groups(ep: tuple[int, int] = (1, 0), etp: tuple[int, int] = (1, 0), **fields: Any) -> SimpleNamespace:
        for group, (size, rank) in {"expert_model": ep, "expert_tensor": etp}.items():
            monkeypatch.setattr(initialization.mpu, f"get_{group}_parallel_world_size", lambda size=size: size)
            monkeypatch.setattr(initialization.mpu, f"get_{group}_parallel_rank", lambda rank=rank: rank)
        return SimpleNamespace(**{**vars(EXPERTS), "expert_model_parallel_size": ep[0], **fields})

    return set_groups


def layers(shapes: dict[str, tuple[int, ...]]) -> "torch.nn.Module":
    """Return a model with parameters of these names."""
    model = torch.nn.Module()
    for name, shape in shapes.items():
        *owners, last = name.split(".")
        owner = model
        for each in owners:
            if not hasattr(owner, each):
                owner.add_module(each, torch.nn.Module())
            owner = getattr(owner, each)
        owner.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))
    return model


def filled(config: SimpleNamespace, shapes: dict[str, tuple[int, ...]]) -> "dict[str, torch.Tensor]":
    model = layers(shapes)
    initialization.initialize_weights(model, config, seed=1)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture
def whole(layout: Layout) -> "Callable[[str, int], torch.Tensor]":
    """The matrices of all experts as sequential layers on one rank have them: whole("fc1", 3)."""
    shapes = {f"mlp.experts.local_experts.{i}.linear_{fc}.weight": WHOLE[fc] for i in range(4) for fc in WHOLE}
    values = filled(layout(), shapes)
    return lambda fc, number: values[f"mlp.experts.local_experts.{number}.linear_{fc}.weight"]


def shard(matrix: "torch.Tensor", fc: str, size: int, rank: int) -> "torch.Tensor":
    """The part of an expert tensor-parallel rank: of the gate's and the up projection's rows, or of the columns."""
    if fc == "fc2":
        return matrix.chunk(size, 1)[rank]
    return torch.cat([half.chunk(size)[rank] for half in matrix.chunk(2)])


LAYOUTS = [((1, 0), (1, 0)), ((2, 1), (1, 0)), ((4, 3), (1, 0)), ((2, 1), (2, 1)), ((1, 0), (2, 1))]


@pytest.mark.parametrize(("ep", "etp"), LAYOUTS)
@pytest.mark.parametrize("name", ["local_experts.{}.linear_{}.weight", "linear_{1}.weight{0}"])
def test_experts_have_the_weights_of_one_rank(name: str, ep: Any, etp: Any, layout: Layout, whole: Any) -> None:
    count = 4 // ep[0]
    names = {(fc, i): f"mlp.experts.{name.format(i, f'{fc}')}" for fc in WHOLE for i in range(count)}
    shapes = {names[fc, i]: tuple(shard(whole(fc, i), fc, *etp).shape) for fc, i in names}
    values = filled(layout(ep, etp), shapes)
    for (fc, i), each in names.items():
        assert torch.equal(values[each], shard(whole(fc, i + ep[1] * count), fc, *etp)), each


@pytest.mark.parametrize(("ep", "etp"), LAYOUTS)
def test_all_experts_in_one_parameter(ep: Any, etp: Any, layout: Layout, whole: Any) -> None:
    numbers = range(4 // ep[0] * ep[1], 4 // ep[0] * (ep[1] + 1))
    expected = {fc: torch.stack([shard(whole(fc, i), fc, *etp) for i in numbers]) for fc in WHOLE}
    shapes = {f"mlp.experts.linear_{fc}.weight": tuple(expected[fc].shape) for fc in WHOLE}
    shapes["mlp.experts.linear_fc1.bias"] = (len(numbers), 2 * WIDTH // etp[0])
    values = filled(layout(ep, etp), shapes)
    assert not values.pop("mlp.experts.linear_fc1.bias").any()
    for fc, value in zip(WHOLE, values.values(), strict=True):
        assert torch.equal(value, expected[fc])
    # Megatron-Core 0.16's own grouped layers multiply by [experts, hidden, width] and [experts, width, hidden]
    width = WIDTH // etp[0]
    count = len(numbers)
    shapes = {"mlp.experts.weight1": (HIDDEN, count * 2 * width), "mlp.experts.weight2": (count * width, HIDDEN)}
    first, second = filled(layout(ep, etp), shapes).values()
    assert torch.equal(first.view(count, HIDDEN, -1).mT, expected["fc1"])
    assert torch.equal(second.view(count, -1, HIDDEN).mT, expected["fc2"])


def test_grouped_layers_that_interleave_gate_and_up_projection(layout: Layout, whole: Any) -> None:
    config = layout(moe_mlp_glu_interleave_size=2)
    shapes = {f"mlp.experts.linear_{fc}.weight3": WHOLE[fc] for fc in WHOLE}
    first, second = filled(config, shapes).values()
    gate, up = whole("fc1", 3).chunk(2)
    assert torch.equal(first[:4], torch.cat([gate[:2], up[:2]]))
    assert torch.equal(first.view(-1, 2, 2, HIDDEN)[:, 1].reshape(up.shape), up)
    assert torch.equal(second, whole("fc2", 3))


def test_shared_experts_are_no_routed_ones(layout: Layout) -> None:
    name = "mlp.shared_experts.linear_fc2.weight"
    one, other = (filled(layout(ep), {name: WHOLE["fc2"]})[name] for ep in ((1, 0), (2, 1)))
    assert torch.equal(one, other)


def test_experts_are_marked_as_sharded_where_they_are(layout: Layout) -> None:
    start = "mlp.experts."
    grouped = {f"{start}linear_fc1.weight0": 0, f"{start}linear_fc2.weight0": 1, f"{start}linear_fc1.bias0": 0}
    sequential = {f"{start}local_experts.0.linear_fc1.weight": 0, f"{start}local_experts.0.linear_fc2.weight": 1}
    whole = [f"{start}linear_fc2.bias0", "mlp.shared_experts.linear_fc1.weight", "mlp.router.weight"]
    shapes = dict.fromkeys([*grouped, *sequential, *whole], (4, 4))
    for etp, expected in (((1, 0), {}), ((2, 1), grouped | sequential)):
        layout((2, 0), etp)
        model = layers(shapes)
        initialization.mark_shards(model)
        marked = {n: p.partition_dim for n, p in model.named_parameters() if getattr(p, "tensor_model_parallel", False)}
        assert marked == expected


def test_what_every_rank_has_whole_is_not_marked_as_sharded(layout: Layout) -> None:
    """Megatron-Core 0.16 leaves Transformer Engine's mark on the down projections of latent attention."""
    layout()
    model = layers({"self_attention.linear_q_down_proj.weight": (4, 4), "self_attention.linear_proj.weight": (4, 4)})
    for name, mode in {"linear_q_down_proj": None, "linear_proj": "row"}.items():
        product = getattr(model.self_attention, name)
        product.parallel_mode, product.weight.tensor_model_parallel = mode, True
    initialization.mark_shards(model)
    assert [each.tensor_model_parallel for each in model.parameters()] == [False, True]
