from __future__ import annotations

from smdistributed.modelparallel.common.config.docs import page, table
from smdistributed.modelparallel.common.config.parameters import Environment, Parameters


def _cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_one_row_for_each_parameter() -> None:
    header, rule, *rows = _cells(table(Parameters))
    assert len(rows) == len(Parameters.model_fields)
    assert {len(row) for row in (header, rule, *rows)} == {7}
    by_name = {row[0].split(",")[0].strip("`"): row for row in rows}
    assert list(by_name) == list(Parameters.model_fields)
    assert by_name["pipeline_parallel_degree"][0] == "`pipeline_parallel_degree`, `partitions`"
    assert by_name["memory_weight"][2:5] == [
        "a number, at least 0.0, at most 1.0",
        "0.2 if optimize is speed, else 0.8",
        "PyTorch",
    ]
    assert by_name["contiguous"][2:6] == ["true or false", "`true`", "TensorFlow", "1.1"]
    words = "one of interleaved, simple, zero_bubble, zero_bubble_v, auto"
    assert by_name["pipeline"][2:5] == [words, "`interleaved`", "both"]
    assert all(all(row) for row in rows)


def test_page_has_every_group() -> None:
    text = page()
    assert table(Parameters) in text
    assert table(Environment) in text
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if "|" in line}
    assert "| an integer, at least 1 | required |" in lines["`processes_per_host`"]
    assert "| a dictionary | required |" in lines["`parameters`"]
