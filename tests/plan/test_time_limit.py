"""Slurm's time limits in seconds, as sbatch(1) defines them."""

import pytest

from cloudai_mbridge.models.slurm_values import parse_time_limit
from tests.golden import Sentence


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1", 60),
        ("90", 90 * 60),
        ("1:30", 90),
        ("90:30", 90 * 60 + 30),
        ("01:00:00", 3600),
        ("00:00:30", 30),
        ("100:00:00", 360000),
        ("1-0", 86400),
        ("2-12", 2 * 86400 + 12 * 3600),
        ("1-06:30", 86400 + 6 * 3600 + 30 * 60),
        ("1-06:30:15", 86400 + 6 * 3600 + 30 * 60 + 15),
        ("0-00:00:30", 30),
    ],
)
def test_all_forms(text: str, seconds: float) -> None:
    assert parse_time_limit(text) == seconds


def test_no_limit() -> None:
    assert parse_time_limit(None) is None


@pytest.mark.parametrize("text", ["0", "00:00:00", "0-0"])
def test_zero_means_no_limit(text: str) -> None:
    """sbatch(1), --time: a time limit of zero requests that no time limit be imposed."""
    assert parse_time_limit(text) is None


@pytest.mark.parametrize("text", ["", "1h", "1-", "-1", "1:2:3:4", "1-2:3:4:5", "1.5", "1 ", "10\n", "\u0663"])
def test_what_is_no_time_limit(sentence: Sentence, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_time_limit(text)
    sentence(caught)
