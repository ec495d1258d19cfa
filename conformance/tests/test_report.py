"""Rows stand as the worst of their cases, and none is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import registry, rows
from conformance.outcome import Outcome, Status
from conformance.report import Report
from conformance.worlds import FRAMEWORKS


def _case(name: str, *of: str) -> registry.Case:
    return registry.Case(name, of, ("alone",), ("torch",), lambda adapter: None)


@pytest.fixture
def report() -> Report:
    specified = {name: rows.Row(name, ("torch",), "a document") for name in "abcdg"}
    for name in "ef":
        specified[name] = rows.Row(name, ("torch",), "a document", without_effect="for a reason")
    cases = {
        "one": _case("one", "a", "b", "e"),
        "two": _case("two", "b", "f"),
        "three": _case("three", "c"),
        "four": _case("four", "g"),
        "five": _case("five", "g"),
    }
    outcomes = {
        "one": Outcome(Status.PASSED),
        "two": Outcome(Status.FAILED, "<because>"),
        "three": Outcome(Status.NOT_BUILT, "later"),
        "four": Outcome(Status.PASSED),
        "five": Outcome(Status.NOT_INSTALLED, "it needs something"),
    }
    return Report("torch", specified, cases, outcomes)


def test_rows_stand_as_their_worst_case(report: Report) -> None:
    assert {row: report.status_of(row).value for row in report.rows} == {
        "a": "passed",
        "b": "failed",
        "c": "not yet built",
        "d": "no case",
        "e": "accepted, without effect",
        "f": "failed",
        "g": "not installed",
    }
    assert report.totals() == {
        "passed": 1,
        "accepted, without effect": 1,
        "failed": 2,
        "not yet built": 1,
        "not installed": 1,
        "no case": 1,
    }


def test_every_form_has_every_row(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path)
    for name in ("report.txt", "report.json", "report.html"):
        text = (tmp_path / name).read_text()
        for status in Status:
            assert status.value in text
        assert "because" in text
    assert "<because>" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_cases_name_rows_that_there_are(framework: str) -> None:
    known = rows.everything()
    for case in registry.load(framework).values():
        assert set(case.rows) <= known, case.name
