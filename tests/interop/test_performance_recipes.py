"""Which performance recipes of Megatron-Bridge 0.6 our loop takes, and what it would need for the others.

docs/tables/performance-recipes.txt holds the same tables.
"""

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.figures import Figure
from tests.interop.compare_containers import Found, Reasons, differences, read, table
from tests.interop.conftest import BRIDGE_0_6, REPOSITORY, tree

HERE = Path(__file__).parent
CORE_0_6 = Path(sys.prefix) / "megatron-core-0.19"
PAGE = REPOSITORY / "docs/tables/performance-recipes.txt"
REASONS = Reasons(HERE / "resolved_differences.toml")
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"
GPUS = {"h100": "H100", "b200": "B200", "b300": "B300", "gb200": "GB200", "gb300": "GB300"}
LATER = {"vr200": "VR200", "r100": "R100"}
# It only grows; ten of these with the fields of the data in GIVEN
TAKEN_AT_LEAST = 306
# Those of text models that are not; it only shrinks
LEFT_AT_MOST = 7
GIVEN = {
    "checkpoint.pretrained_checkpoint": "with the weights that adapters are trained on",
    "dataset.path_to_cache": "with a directory of data indices",
    "dataset.seq_length": "with samples as long as the model's sequences",
}

# In words -> the fields for which a container is refused. A field that is nowhere here is a row of its own
NEEDS: dict[str, tuple[str, ...]] = {
    "vision-language models": ("dataset = MockVLMSFTDatasetConfig",),
    "adapters": ("peft = LoRA",),
    "other attention": ("model.experimental_attention_variant",),
    "video models": ("model = WanModelProvider", "dataset = WanDatasetConfig"),
}

OF_OTHER_MODELS = ("vision-language models", "video models")

Verdict = dict[str, Any]


def run(script: str, *arguments: str, given: str = "") -> str:
    """Return what a script of this directory prints with the Megatron-Core of 0.6."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        input=given,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(CORE_0_6), str(REPOSITORY)))},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    """What both loops make of each recipe's container."""
    if not (CORE_0_6 / "megatron/core").is_dir():
        pytest.skip(f"{CORE_0_6.name} is not installed beside the environment's Megatron-Core")
    theirs = run("real_containers.py", str(tree(BRIDGE_0_6)))
    ours = run("judge_containers.py", given=theirs)
    pairs = zip(theirs.splitlines(), ours.splitlines(), strict=True)
    return [{**json.loads(their), **json.loads(our)} for their, our in pairs]


@pytest.fixture(scope="module")
def found(verdicts: list[Verdict]) -> Found:
    """What differs in the containers as the two loops resolve the same file."""
    counts: Found = defaultdict(Counter)
    for each in verdicts:
        if each["prepared"] and "resolved" in each:
            compared = differences(read(each["resolved"]), each["unset"], read(each["prepared"]))
            for field, values in compared.items():
                counts[field][values] += 1
    return counts


def test_every_recipe_has_a_verdict_with_its_reasons(verdicts: list[Verdict]) -> None:
    assert len(verdicts) == len({each["recipe"] for each in verdicts}) == 428
    assert {each["gpu"] for each in verdicts} == {*GPUS, *LATER}
    assert [each for each in verdicts if (each["message"] is None) != (each["needs"] == [])] == []


def test_our_loop_takes_as_many_as_before(verdicts: list[Verdict], figure: Figure) -> None:
    figure(tables(verdicts))
    assert len(_taken(verdicts, GPUS)) >= TAKEN_AT_LEAST
    assert len(_left(verdicts)) <= LEFT_AT_MOST
    assert {field for each in verdicts for field in each["given"]} == set(GIVEN)


def test_both_loops_resolve_a_file_alike(found: Found) -> None:
    REASONS.check(found)


def test_the_page_has_these_tables(verdicts: list[Verdict], found: Found) -> None:
    check_page(PAGE, "\n".join([tables(verdicts), _resolved(verdicts), *REASONS.tables(found)]))


def _resolved(verdicts: list[Verdict]) -> str:
    taken = [each for each in verdicts if each["message"] is None]
    both = sum("resolved" in each for each in taken)
    refused = "".join(
        f"- `{each['recipe'].removesuffix('_config')}`: {each['refused'].splitlines()[0]}\n"
        for each in taken
        if "refused" in each
    )
    lines = [
        f"Both loops resolve {both} of the {len(taken)} that are taken; the others Megatron-Bridge refuses itself:\n"
    ]
    return "\n".join([*lines, refused, "Of these, resolved, the two differ in this alone:\n"])


def check_page(page: Path, tables: str) -> None:
    """Compare a page's tables with fresh ones; where they differ, a fresh page is left in `build`."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    fresh = REPOSITORY / "build" / page.name
    fresh.parent.mkdir(exist_ok=True)
    fresh.write_text(f"{before}{BEGIN}{tables}{END}{rest.partition(END)[2]}", encoding="utf-8")
    assert text == fresh.read_text(encoding="utf-8"), f"copy {fresh} to {page}"


def tables(verdicts: list[Verdict]) -> str:
    """Return the page's tables: how many are taken, which, and what the others need."""
    now = [each for each in verdicts if each["gpu"] in GPUS]
    head = ["", *GPUS.values(), f"of {len(now)}", ", ".join(LATER.values())]
    counts = [
        ["recipes", *_by_gpu(verdicts)],
        ["taken", *_by_gpu(each for each in verdicts if each["message"] is None)],
    ]
    for field, words in GIVEN.items():
        given = [each for each in verdicts if each["message"] is None and field in each["given"]]
        counts.append([f"of these {words} (`{field}`)", *_by_gpu(given)])
    needs = Counter(need for each in now for need in _words(each))
    rows = []
    for need, _ in sorted(needs.items(), key=lambda item: (-item[1], item[0])):
        needing = [each for each in verdicts if need in _words(each)]
        fields = sorted({name for each in needing for name in each["needs"] if _word(name) == need})
        rows.append([need, *_by_gpu(needing), ", ".join(f"`{name}`" for name in fields)])
    taken = [f"- {gpu}: {_names(verdicts, key) or 'none'}" for key, gpu in {**GPUS, **LATER}.items()]
    text = [each for each in now if not any(_word(need) in OF_OTHER_MODELS for need in each["needs"])]
    left = [f"- `{each['recipe'].removesuffix('_config')}`: {each['message']}" for each in _left(verdicts)]
    title = f"Of the {len(text)} recipes of text models for these five GPUs, {len(left)} are not taken:\n"
    parts = [table(head, counts), title, *left, "\nTaken:\n", *taken, ""]
    parts.append(table(["Needs", *head[1:], "Fields"], rows))
    return "\n".join(parts)


def _left(verdicts: list[Verdict]) -> list[Verdict]:
    """Return what is not taken of text models and the five GPUs."""
    refused = [each for each in verdicts if each["gpu"] in GPUS and each["message"] is not None]
    return [each for each in refused if not any(_word(need) in OF_OTHER_MODELS for need in each["needs"])]


def _taken(verdicts: list[Verdict], gpus: Iterable[str]) -> list[str]:
    return [each["recipe"] for each in verdicts if each["message"] is None and each["gpu"] in set(gpus)]


def _names(verdicts: list[Verdict], gpu: str) -> str:
    return ", ".join(f"`{name.removesuffix('_config')}`" for name in sorted(_taken(verdicts, [gpu])))


def _by_gpu(verdicts: Iterable[Verdict]) -> list[str]:
    counts = Counter(each["gpu"] for each in verdicts)
    return [*(str(counts[gpu]) for gpu in GPUS), *(str(sum(counts[gpu] for gpu in some)) for some in (GPUS, LATER))]


def _word(field: str) -> str:
    if " " in field.replace(" = ", ""):
        return "nothing: Megatron-Bridge refuses them, too"
    return next((word for word, fields in NEEDS.items() if field in fields), f"`{field}`")


def _words(verdict: Verdict) -> set[str]:
    words = {_word(field) for field in verdict["needs"]}
    assert "refused" in verdict or not any(word.startswith("nothing") for word in words), verdict["message"]
    return words
