"""Cases of one decision, run as one test."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

Test = Callable[..., None]
_LONGEST_NAME = 200
_FAILURES = (Exception, pytest.fail.Exception, pytest.skip.Exception)  # a case that is skipped hides what it tests


def every(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test on every case, and fail it with the names of all cases that fail.

    It takes what pytest's `parametrize` takes. Each case has its own directory in `tmp_path`, its own `monkeypatch` and
    an empty `capsys`; all other fixtures are shared.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    every_case = [_values(case, len(arguments)) for case in cases]
    assert every_case, "there is no case"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failures: list[tuple[str, BaseException]] = []
            for number, (name, values) in enumerate(every_case):
                try:
                    with _fresh(fixtures, number) as own:
                        test(**own, **dict(zip(arguments, values, strict=True)))
                except _FAILURES as error:
                    failures.append((name, error))
            if failures:
                lines = "\n".join(f"{name}: {type(error).__name__}: {error}" for name, error in failures)
                raise AssertionError(f"{len(failures)} of {len(every_case)} cases failed:\n{lines}") from failures[0][1]

        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate


def _values(case: Any, count: int) -> tuple[str, Sequence[Any]]:
    """Return the name and the arguments of a case; it may be a `pytest.param` with an id."""
    if isinstance(case, type(pytest.param())):
        assert not case.marks, "a case has no marks of its own"
        return case.id or repr(case.values)[:_LONGEST_NAME], case.values
    return repr(case)[:_LONGEST_NAME], (case,) if count == 1 else case


@contextmanager
def _fresh(fixtures: Mapping[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Yield the fixtures of one case."""
    own = dict(fixtures)
    if "tmp_path" in own:
        own["tmp_path"] = own["tmp_path"] / str(number)
        own["tmp_path"].mkdir()
    if "capsys" in own:
        own["capsys"].readouterr()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if "monkeypatch" in own:
            own["monkeypatch"] = monkeypatch
        yield own
