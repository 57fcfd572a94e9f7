"""Our recipes beside upstream's: the containers that both train, field by field, for every GPU and number format.

Upstream's is that of its launcher's dry run; ours has the sizes of the same preset. Both are prepared as on a GPU.
"""

import json
from collections import Counter, defaultdict

import pytest

from cloudai_mbridge.megatron_bridge.preset_rows import catalog
from cloudai_mbridge.megatron_bridge.release import Release
from cloudai_mbridge.models.cmd_args import ADAPTER_TASKS
from cloudai_mbridge.recipes.load import recipe_names
from tests.figures import Figure
from tests.interop.compare_containers import Found, Reasons, differences, read, table
from tests.interop.conftest import BRIDGE_0_6, REPOSITORY, tree
from tests.interop.test_performance_recipes import CORE_0_6, HERE, check_page, run
from tests.interop.test_presets import _argv, _key, _upstream_name

PAGE = REPOSITORY / "docs/tables/recipe-differences.txt"
REASONS = Reasons(HERE / "container_differences.toml")
COMPARED_AT_LEAST = 284
FINE_TUNED = 27
WEIGHTS = "/tmp"  # a directory that is there
Answers = list[tuple[dict[str, object], dict[str, object]]]


@pytest.fixture(scope="module")
def requests() -> list[dict[str, object]]:
    """Every preset of 0.6 of a recipe that ships here."""
    if not (CORE_0_6 / "megatron/core").is_dir():
        pytest.skip(f"{CORE_0_6.name} is not installed beside the environment's Megatron-Core")
    known = catalog(Release("0.6.0", "shipped"))
    assert known
    rows = [row for row in known.rows if row.recipe in recipe_names()]
    points = [{**_key(row), "num_gpus": row.num_gpus} for row in rows]
    weights = [{"pretrained_checkpoint": WEIGHTS} if row.task in ADAPTER_TASKS else {} for row in rows]
    names = [_upstream_name(row, known.is_flat) for row in rows]
    return [
        {
            **{"recipe": name, "gpu": row.gpu, "num_gpus": row.num_gpus, "args": point | more},
            "argv": [*_argv(point), *(word for key, value in more.items() for word in (f"--{key}", value))],
        }
        for name, row, point, more in zip(names, rows, points, weights, strict=True)
    ]


@pytest.fixture(scope="module")
def all_answers(requests: list[dict[str, object]]) -> Answers:
    """The containers of both, or why they are refused."""
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    theirs = run("launched_containers.py", str(tree(BRIDGE_0_6)), given=lines)
    ours = run("our_containers.py", given=lines)
    return [(json.loads(a), json.loads(b)) for a, b in zip(theirs.splitlines(), ours.splitlines(), strict=True)]


@pytest.fixture(scope="module")
def answers(all_answers: Answers) -> Answers:
    """Those for pre-training."""
    return [pair for pair in all_answers if "_pretrain_" in str(pair[0]["recipe"])]


@pytest.fixture(scope="module")
def found(answers: Answers) -> Found:
    """What differs in the containers for pre-training."""
    return found_in(answers)


def found_in(answers: Answers) -> Found:
    """Return what differs in the containers that neither side refuses."""
    counts: Found = defaultdict(Counter)
    for theirs, ours in answers:
        if "yaml" in theirs and "yaml" in ours:
            assert theirs["recipe"] == ours["recipe"]
            here = read(ours["yaml"]) | {f"env_vars.{name}": value for name, value in ours["env"].items()}
            for path, values in differences(read(theirs["yaml"]), theirs["unset"], here).items():
                counts[path][values] += 1
    return counts


def test_fine_tuning_differs_in_nothing_else(all_answers: Answers, answers: Answers) -> None:
    pairs = [pair for pair in all_answers if pair not in answers]
    assert sum("yaml" in theirs and "yaml" in ours for theirs, ours in pairs) == len(pairs) == FINE_TUNED
    assert {field: dict(values) for field, values in found_in(pairs).items() if REASONS.of(field) is None} == {}


def test_every_difference_has_a_reason_and_every_reason_a_difference(found: Found) -> None:
    REASONS.check(found)


def test_the_page_has_these_tables(found: Found, answers: Answers, figure: Figure) -> None:
    compared = sum("yaml" in theirs and "yaml" in ours for theirs, ours in answers)
    figure(f"{compared} of {len(answers)} presets compared, {len(found)} fields differ somewhere")
    assert compared >= COMPARED_AT_LEAST
    check_page(PAGE, tables(found, answers))


def tables(found: Found, answers: Answers) -> str:
    """Return the page's tables: what could be compared, and what differs."""
    recipes = defaultdict(Counter)
    for theirs, ours in answers:
        name = str(theirs["recipe"]).partition("_pretrain")[0]
        recipes[name]["presets"] += 1
        recipes[name]["compared"] += "yaml" in theirs and "yaml" in ours
        recipes[name]["upstream"] += "refused" in theirs
        recipes[name]["here"] += "refused" in ours
    columns = ("presets", "compared", "upstream", "here")
    counts = [[f"`{name}`", *(str(recipes[name][column]) for column in columns)] for name in sorted(recipes)]
    head = ["Recipe", "presets of 0.6", "compared", "refused by upstream itself", "refused here"]
    return "\n".join([table(head, counts), *REASONS.tables(found)])
