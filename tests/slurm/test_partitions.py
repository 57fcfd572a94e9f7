"""Partitions and GPUs as sinfo writes them."""

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.schedulers.slurm import limits
from cloudai_mbridge.schedulers.slurm.commands import Answer
from cloudai_mbridge.schedulers.slurm.limits import find_nodes, parse_nodes

SINFO = """\
batch*|4:00:00|2|login[1-2]|(null)
batch*|4:00:00|128|h100-[001-128]|gpu:h100:8(S:0-1)
small|30:00|1|a1|gpu:2
empty|infinite|0||(null)
long|infinite|4|x[1-2],y[1-2]|shard:8,gpu:nvidia_h100_80gb_hbm3:4(S:0,2),gpu:tiny:1
mig|2-00:00:00|1|m1|gpu:1g.10gb:7,license:1
"""


def test_the_lines_of_sinfo() -> None:
    found = [(n.partition, n.is_default, n.time_limit_s, n.num_nodes, n.gpus, n.gpu_type) for n in parse_nodes(SINFO)]
    assert found == [
        ("batch", True, 14400, 2, 0, None),
        ("batch", True, 14400, 128, 8, "h100"),
        ("small", False, 1800, 1, 2, None),
        ("long", False, None, 4, 5, None),
        ("mig", False, 172800, 1, 7, "1g.10gb"),
    ]


@pytest.mark.parametrize(("name", "names"), [(None, "h100-[001-128]"), ("small", "a1")])
def test_a_partition_of_several_kinds(monkeypatch: pytest.MonkeyPatch, name: str | None, names: str) -> None:
    monkeypatch.setattr(limits, "run_command", lambda *argv: Answer(0, SINFO, ""))
    assert find_nodes(name).names == names


@pytest.mark.parametrize(("name", "words"), [("larg", "no partition 'larg'"), (None, "no default partition")])
def test_a_partition_that_is_not_there(monkeypatch: pytest.MonkeyPatch, name: str | None, words: str) -> None:
    monkeypatch.setattr(limits, "run_command", lambda *argv: Answer(0, SINFO.replace("*", ""), ""))
    with pytest.raises(BadInput, match=f"{words}; use one of batch, long, mig, small"):
        find_nodes(name)
