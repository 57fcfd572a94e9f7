"""Sorting, filtering, choosing and turning pages, with the mouse and without."""

import pytest

from tests.report.html.conftest import Open, Opened
from tests.report.html.make_report import make_died, make_failed, make_point, make_rejected, make_report, make_sweep

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def page_of_six(show: Open) -> Opened:
    points = [
        make_point("slow", {"tp": 1, "name": "x"}, time_s=5.0, memory_gib=None),
        make_rejected("never", {"tp": 3, "name": "x"}),
        make_point("fast", {"tp": 2, "name": "y"}, time_s=3.0),
        make_died("died", {"tp": 10, "name": "y"}),
        make_failed("odd", {"tp": 2, "name": "z"}, time_s=4.5),
        make_point("middle", {"tp": 10, "name": "z"}, time_s=4.0, node="gb200-7"),
    ]
    return show(make_report(points))


@pytest.fixture
def table(page_of_six: Opened) -> Opened:
    """Return the page as it was when it was opened: opening it again would take longer."""
    page = page_of_six.page
    page.click("#clear-filters")
    while (button := page.locator("th:is([aria-sort=ascending], [aria-sort=descending]) button")).count():
        button.click()
    page.click("#select-best")
    page_of_six.settle()
    page.evaluate("document.getElementById('axis-filters').open = false")
    return page_of_six


@pytest.fixture(scope="module")
def sweep(show: Open) -> Opened:
    return show(make_report(make_sweep(repeats=4)))


def start_over(opened: Opened) -> None:
    """Put the keyboard where it is when a page is opened."""
    opened.page.reload()
    opened.settle()


def sort(opened: Opened, column: str) -> str:
    opened.page.click(f"th[data-column='{column}'] button")
    return opened.page.get_attribute(f"th[data-column='{column}']", "aria-sort")


def test_clicking_sorts_up_then_down_then_not(table: Opened) -> None:
    assert sort(table, "step_time_s") == "ascending"
    assert table.names() == ["fast", "middle", "slow", "died", "odd", "never"]
    assert sort(table, "step_time_s") == "descending"
    assert table.names() == ["slow", "middle", "fast", "died", "odd", "never"]
    assert sort(table, "step_time_s") == "none"
    assert table.names() == ["slow", "never", "fast", "died", "odd", "middle"]


def test_the_fastest_come_first_and_below_them_what_failed_with_its_reasons(table: Opened) -> None:
    start_over(table)
    assert table.page.get_attribute("th[data-column=step_time_s]", "aria-sort") == "ascending"
    assert table.names() == ["fast", "middle", "slow", "died", "odd", "never"]
    reasons = table.page.inner_text("#rows tr[data-run='3'] + tr.why div")
    assert reasons.split("\n") == [
        "A GPU ran out of memory (out_of_memory)",
        "exit code 1",
        "0 of 20 steps are in the log",
    ]


def test_only_one_column_is_sorted(table: Opened) -> None:
    sort(table, "step_time_s")
    sort(table, "name")
    assert table.page.locator("#rows th[aria-sort=ascending]").count() == 1
    assert table.names() == sorted(table.names())


def test_nan_and_missing_stay_last(table: Opened) -> None:
    sort(table, "loss")
    assert table.names()[3:] == ["odd", "died", "never"]
    sort(table, "loss")
    assert table.names()[3:] == ["odd", "died", "never"]


def test_coordinates_sort_as_numbers(table: Opened) -> None:
    sort(table, "axis:tp")
    assert table.column("axis:tp") == ["1", "2", "2", "3", "10", "10"]


def test_sorting_by_keyboard(table: Opened) -> None:
    button = table.page.locator("th[data-column=step_time_s] button")
    button.focus()
    table.page.keyboard.press("Enter")
    assert table.names()[0] == "fast"
    table.page.keyboard.press("Space")
    assert table.names()[0] == "slow"
    assert button.evaluate("button => button === document.activeElement")


def test_text_filter_wants_all_words(table: Opened) -> None:
    table.filter("tp=2 success")
    assert table.names() == ["fast"]
    assert table.page.inner_text("#count") == "1 of 6 rows"
    table.filter("GB200-7")
    assert table.names() == ["middle"]
    table.filter("no such thing")
    assert table.names() == []
    assert table.page.locator("#table > .empty").is_visible()


def test_the_count_is_announced(table: Opened) -> None:
    assert table.page.get_attribute("#count", "aria-live") == "polite"


def test_verdict_filter(table: Opened) -> None:
    table.page.check("#filters input[data-kind=verdict] >> nth=1")
    table.settle()
    assert set(table.column("verdict")) == {"✗ failed"}
    table.page.check("#filters input[data-kind=verdict] >> nth=2")
    assert table.page.inner_text("#count") == "3 of 6 rows"


def test_axis_filter_widens_within_an_axis_and_narrows_across(table: Opened) -> None:
    table.page.click("#axis-filters summary")
    boxes = table.page.locator("#filters input[data-kind='axis:tp']")
    boxes.nth(1).check()
    assert set(table.names()) == {"fast", "odd"}
    boxes.nth(3).check()
    assert set(table.names()) == {"fast", "odd", "died", "middle"}
    table.page.locator("#filters input[data-kind='axis:name'] >> nth=2").check()
    assert set(table.names()) == {"odd", "middle"}
    table.page.click("#clear-filters")
    assert len(table.names()) == 6
    assert table.page.locator("#filters input:checked").count() == 0


def test_charts_follow_the_filter(sweep: Opened) -> None:
    label = "#parallel figure .plot > svg"
    before = sweep.page.get_attribute(label, "aria-label")
    sweep.filter("tp=8")
    after = sweep.page.get_attribute(label, "aria-label")
    assert before != after
    assert "tp" not in after.split(" over ")[1].split(", ")
    sweep.filter("")
    assert sweep.page.get_attribute(label, "aria-label") == before


def test_selecting_rows_changes_the_curves(table: Opened) -> None:
    def num_lines() -> int:
        return table.page.locator("#curves figure >> nth=0 >> svg [data-mark=line]").count()

    assert num_lines() == 3  # the best: the runs that succeeded
    table.page.click("#select-none")
    table.settle()
    assert "No run with steps is selected." in table.page.inner_text("#curves")
    table.page.check("#rows tr[data-run='4'] input")
    table.settle()
    assert num_lines() == 1
    assert "odd" in table.page.inner_text("#curves .selection")
    table.page.click("#select-best")
    table.settle()
    assert num_lines() == 3


def test_what_has_no_steps_cannot_be_selected(table: Opened) -> None:
    assert table.page.locator("#rows tr[data-run='1'] input").is_disabled()
    assert table.page.locator("#rows tr[data-run='3'] input").is_disabled()


def test_pages(sweep: Opened) -> None:
    total = int(sweep.page.inner_text("#count").split(" of ")[0])
    assert total > 200
    assert sweep.page.locator("#rows tr[data-run]").count() == 200
    sweep.page.locator("button[data-to='Next page']").focus()
    sweep.page.keyboard.press("Enter")
    assert "page 2 of 2" in sweep.page.inner_text(".pages")
    assert sweep.page.locator("#rows tr[data-run]").count() == total - 200
    assert sweep.page.locator("button[data-to='Next page']").is_disabled()
    focused = sweep.page.evaluate("document.activeElement.dataset.to")
    assert focused == "First page"  # the button that was pressed can no longer hold the focus
    sweep.page.select_option(".pages select", "1000")
    assert sweep.page.locator("#rows tr[data-run]").count() == total
    sweep.page.select_option(".pages select", "200")


def test_tab_reaches_what_can_be_used(table: Opened) -> None:
    start_over(table)
    table.page.evaluate("document.getElementById('axis-filters').open = true")
    reached = []
    for _ in range(90):
        table.page.keyboard.press("Tab")
        reached.append(
            table.page.evaluate(
                """() => { const e = document.activeElement;
                  return e.id || e.dataset.column || e.dataset.kind || e.closest('th')?.dataset.column
                    || e.getAttribute('aria-label') || e.textContent.slice(0, 40); }"""
            )
        )
    wanted = ["theme", "text-filter", "verdict", "clear-filters", "axis:tp", "Table of all points, may scroll"]
    for name in [*wanted, "name", "step_time_s", "Draw slow", "select-best", "select-none"]:
        assert name in reached, name
    assert reached[0] == "Skip to the table"


def test_focus_is_visible(table: Opened) -> None:
    start_over(table)
    table.page.keyboard.press("Tab")
    style = table.page.evaluate(
        "(() => { const s = getComputedStyle(document.activeElement); return [s.outlineStyle, s.outlineWidth]; })()"
    )
    assert style == ["solid", "3px"]
    box = table.page.locator(".skip").bounding_box()
    assert box["y"] >= 0


def test_space_ticks_a_row(table: Opened) -> None:
    table.page.locator("#rows tr[data-run='4'] input").focus()
    table.page.keyboard.press("Space")
    table.settle()
    assert table.page.inner_text("#announcements").startswith("4 runs selected")


def test_nothing_complained(table: Opened, sweep: Opened) -> None:
    sweep.assert_quiet()
    assert (table.console, table.errors, table.dialogs) == ([], [], [])
    assert set(table.requests) == {table.path.as_uri()}
