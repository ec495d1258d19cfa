"""A notebook that is written for the service runs as it is, in both doors, to the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from notebook_bench import DOORS, losses_of_notebook, run

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

#: Of both doors.
LOSSES: dict[str, list[str]] = {}


@pytest.mark.parametrize("door", DOORS)
def test_the_same_notebook_in_both_doors(tmp_path: Path, door: str) -> None:
    LOSSES[door] = losses_of_notebook(tmp_path, door)
    assert len({tuple(each) for each in LOSSES.values()}) == 1


def test_a_cell_that_fails_is_the_end(tmp_path: Path) -> None:
    cells = ["print('first')", "raise ValueError('planted')", "print('last')"]
    document = {
        "cells": [
            {
                "cell_type": "code",
                "id": f"c{index}",
                "metadata": {},
                "source": text,
                "outputs": [],
                "execution_count": None,
            }
            for index, text in enumerate(cells)
        ],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (tmp_path / "bad.ipynb").write_text(json.dumps(document))
    done = run(tmp_path, "run", "--output", "kept.ipynb", "bad.ipynb")
    assert done.returncode == 2
    assert "first" in done.stdout
    assert "last" not in done.stdout
    assert "bad.ipynb: a cell failed: ValueError: planted" in done.stderr
    assert "first" in (tmp_path / "kept.ipynb").read_text()
    (tmp_path / "none.ipynb").write_text("{")
    done = run(tmp_path, "run", "none.ipynb")
    assert done.returncode == 2
    assert "none.ipynb must be a notebook" in done.stderr
