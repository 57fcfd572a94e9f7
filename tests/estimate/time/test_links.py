import pytest

from cloudai_mbridge.estimate.hardware import gpu_named
from cloudai_mbridge.estimate.time.parts import exchange_shares, ring_gb_s
from tests.cases import every

H100, GB200 = gpu_named("h100"), gpu_named("gb200")


@every(
    ("ranks", "stride", "expected"),
    [
        (8, 1, 450),  # a node
        (2, 4, 450),  # two of a node
        (16, 1, 400),  # every adapter of the node carries a ring
        (16, 2, 200),  # four of its ranks in a node
        (16, 8, 50),  # one of its ranks in a node
        (4, 64, 50),
    ],
)
def test_ring_runs_as_fast_as_its_slowest_link(ranks: int, stride: int, expected: float) -> None:
    assert ring_gb_s(H100, ranks, stride) == expected


def test_a_rack_is_one_domain() -> None:
    assert ring_gb_s(GB200, 64, 1) == 900
    assert ring_gb_s(GB200, 128, 1) == 900  # 72 adapters outrun NVLink
    assert ring_gb_s(GB200, 4, 64) == 50


def test_within_the_domain_nothing_crosses_the_network() -> None:
    near, far = exchange_shares(GB200, 64, 8)
    assert far == 0
    assert 7 < near < 8  # nearly every expert is on another rank


def test_tokens_go_to_a_domain_once() -> None:
    _, far = exchange_shares(H100, 64, 8)
    assert 0 < far < 8 * 7 / 8
    assert far == pytest.approx(8 * (1 - (7 / 8) ** 8) * 7 / 8)


def test_tokens_go_to_a_rank_once() -> None:
    near, _ = exchange_shares(H100, 2, 8)
    assert near == pytest.approx((1 - 0.5**8) * 2 * 0.5)


def test_more_experts_send_more() -> None:
    sent = [exchange_shares(H100, 32, copies) for copies in (1, 2, 4, 8)]
    assert sent == sorted(sent)
