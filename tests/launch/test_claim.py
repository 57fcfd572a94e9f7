"""One job of an attempt claims it, in bash as in Python; the runner can claim it for none."""

import subprocess
from collections import Counter
from pathlib import Path

import pytest

from cloudai_mbridge.launch.claim import LOST_CLAIM, NO_CLAIM, claim_lines, claimed_by, take_claim
from tests.cases import every

pytestmark = pytest.mark.process

TOKEN = "0123456789abcdef"
SCRIPT = "\n".join((*claim_lines('"${NAME##*.}"', "$JOB"), "echo trained >> trained.txt"))


def script(directory: Path, job: str, name: str = f"mbridge-a-0-0.{TOKEN}") -> "subprocess.Popen[str]":
    env = {"PATH": "/usr/bin:/bin", "JOB": job, "NAME": name}
    return subprocess.Popen(["bash", "-c", SCRIPT], cwd=directory, env=env, stderr=subprocess.PIPE, text=True)


def exit_code(process: "subprocess.Popen[str]") -> int:
    process.communicate()
    return int(process.returncode)


def times_trained(directory: Path) -> int:
    path = directory / "trained.txt"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_the_first_job_claims_it(tmp_path: Path) -> None:
    assert claimed_by(tmp_path, TOKEN) is None
    assert exit_code(script(tmp_path, "17_3")) == 0
    assert claimed_by(tmp_path, TOKEN) == "17_3"
    assert exit_code(script(tmp_path, "18_3")) == LOST_CLAIM
    assert take_claim(tmp_path, TOKEN, "19") == "17_3"
    assert times_trained(tmp_path) == 1
    assert (tmp_path / "not_counted.txt").read_text() == f"job=18_3 token={TOKEN} holder=job=17_3\n"


def test_a_job_that_is_started_again_still_has_it(tmp_path: Path) -> None:
    assert [exit_code(script(tmp_path, "17")) for _ in range(2)] == [0, 0]


def test_of_many_at_once_one_wins(tmp_path: Path) -> None:
    racers = [script(tmp_path, str(job)) for job in range(12)]
    assert Counter(map(exit_code, racers)) == {0: 1, LOST_CLAIM: 11}
    assert times_trained(tmp_path) == 1


def test_a_withdrawn_attempt_trains_no_more(tmp_path: Path) -> None:
    assert take_claim(tmp_path, TOKEN, None) is None
    assert exit_code(script(tmp_path, "17")) == LOST_CLAIM
    assert claimed_by(tmp_path, TOKEN) is None
    assert take_claim(tmp_path, TOKEN, None) is None
    assert times_trained(tmp_path) == 0


def test_other_attempts_are_others(tmp_path: Path) -> None:
    assert exit_code(script(tmp_path, "17")) == 0
    assert exit_code(script(tmp_path, "18", f"x.{'f' * 16}")) == 0


@every("name", ["", "mbridge-a-0-0", "x.0123456789ABCDEF", f"x.{TOKEN}0", "x.$(touch oops)"])
def test_a_script_that_is_started_by_hand_claims_nothing(tmp_path: Path, name: str) -> None:
    assert exit_code(script(tmp_path, "17", name)) == 0
    assert exit_code(script(tmp_path, "18", name)) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["trained.txt"]


def test_a_claim_that_cannot_be_made_is_not_had(tmp_path: Path) -> None:
    (tmp_path / f"claim.{TOKEN}").write_text("a file")
    process = script(tmp_path, "17")
    _, said = process.communicate()
    assert (process.returncode, times_trained(tmp_path)) == (NO_CLAIM, 0)
    assert "cannot write" in said
    with pytest.raises(OSError, match="Invalid argument"):
        take_claim(tmp_path, TOKEN, "17")
    assert claimed_by(tmp_path, TOKEN) is None
