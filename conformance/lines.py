"""Which lines of the packages each case runs: what a mutation of a line is tried with.

Processes of a world write them while ``CONFORMANCE_LINES`` names a folder; a case that starts a job
of its own is followed into its first process alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

#: Names the folder that processes write to.
VARIABLE = "CONFORMANCE_LINES"
#: Stands for a case where the start of a world runs lines, before all of its cases.
START = "(start)"
_BELOW = "/smdistributed/modelparallel/"

#: path below the package -> line -> the cases that ran it, as (world, case).
Lines = dict[str, dict[int, list[tuple[str, str]]]]


@contextlib.contextmanager
def noted(world: str, case: str) -> Iterator[None]:
    """Writes which lines run inside, where that is wanted."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        yield
        return
    import coverage

    recorder = coverage.Coverage(data_file=None, include=[f"*{_BELOW}*"], messages=False)
    recorder.start()
    try:
        yield
    finally:
        recorder.stop()
        data = recorder.get_data()
        found = {file.rpartition(_BELOW)[2]: data.lines(file) for file in data.measured_files()}
        text = json.dumps({"world": world, "case": case, "lines": found})
        Path(folder, f"{os.getpid()}-{world}-{case}.json").write_text(text, encoding="utf-8")


def read(folder: Path) -> Lines:
    """Returns what processes wrote."""
    lines: Lines = {}
    for path in sorted(folder.glob("*.json")):
        noted = json.loads(path.read_text(encoding="utf-8"))
        pair = (noted["world"], noted["case"])
        for file, numbers in noted["lines"].items():
            for number in numbers or ():
                pairs = lines.setdefault(file, {}).setdefault(number, [])
                if pair not in pairs:
                    pairs.append(pair)
    return lines
