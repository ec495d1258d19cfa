"""Breaks the packages as a machine would, and counts what the suite notices.

    python -m conformance.mutants --framework torch --sample 300 --jobs 8 --out out/mutants.json

Each mutant changes one line that cases run (``conformance.lines`` tells which, from one run of the
suite) and is tried with the most particular of these cases, then with more of them. One that
survives is tried with the package's unit tests. A sample with one seed is the same sample.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from conformance import lines, registry, runner
from conformance.mutations import PACKAGES, ROOT, sources
from conformance.outcome import Status
from conformance.worlds import WORLDS
from smdistributed.modelparallel.common.testing import RanksFailedError

#: How many cases a mutant is tried with at first, and how many if these do not notice.
_FEW, _MANY = 8, 60
#: How many cases of a world stand for all of them.
_HEAVY = 3
_SECONDS = 240


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        file: below ``smdistributed/modelparallel``.
        line: that it begins in.
        kind: of change.
        operator: its name.
        occurrence: number of the place in the file, for this operator.
        before: the line.
        after: what has become of it.
        text: the whole file with the change.
    """

    file: str
    line: int
    kind: str
    operator: str
    occurrence: int
    before: str
    after: str = ""
    text: str = ""

    @property
    def is_of_the_start(self) -> bool:
        """Whether it can be seen only where processes start as they do for users."""
        return self.file.startswith(("common/comm/", "common/launcher/"))


def by_particularity(known: lines.Lines) -> lines.Lines:
    """Returns the cases of each line, those first that run the fewest lines.

    What the start of a world runs is for all of its cases: those that run the most stand for them.
    """
    weight = collections.Counter(
        pair for numbers in known.values() for pairs in numbers.values() for pair in pairs
    )
    heaviest: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    for pair, _ in weight.most_common():
        if pair[1] != lines.START and len(heaviest[pair[0]]) < _HEAVY:
            heaviest[pair[0]].append(pair)

    def ordered(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        found = dict.fromkeys(pair for pair in pairs if pair[1] != lines.START)
        for world, name in pairs:
            if name == lines.START:
                found.update(dict.fromkeys(heaviest[world]))
        return sorted(found, key=lambda pair: (weight[pair], pair))

    return {
        file: {number: ordered(pairs) for number, pairs in numbers.items()}
        for file, numbers in known.items()
    }


def attempt(
    framework: str, mutant: Mutant, known: lines.Lines, *, with_units: bool
) -> dict[str, object]:
    """Tries a mutant; returns it with what noticed it, if anything did.

    Args:
        framework: whose package it is.
        mutant: what is tried.
        known: the cases of each line, in the order in which they are run.
        with_units: whether one that the suite does not notice is tried with the unit tests.
    """
    pairs = known[mutant.file][mutant.line]
    with sources(framework) as (path, files):
        (file,) = (place / mutant.file for place in files if (place / mutant.file).exists())
        file.write_text(mutant.text, encoding="utf-8")
        found: dict[str, object] = {**dataclasses.asdict(mutant), "cases": len(pairs)}
        del found["text"]
        for part in (pairs[:_FEW], pairs[_FEW:_MANY]):
            if case := _noticing(framework, part, path, is_hasty=not mutant.is_of_the_start):
                return {**found, "verdict": "conformance", "case": case}
        is_noticed = with_units and _fail_units(framework, path)
    return {**found, "verdict": "unit tests" if is_noticed else "survived"}


def _noticing(
    framework: str, pairs: Sequence[tuple[str, str]], path: str, *, is_hasty: bool
) -> str:
    """Returns the first case that fails with these sources; an empty text if none does."""
    wanted: dict[str, list[str]] = {}
    for world, name in pairs:
        wanted.setdefault(world, []).append(name)
    for world, names in wanted.items():
        outcomes = runner.outcomes_in(framework, WORLDS[world], names, path, is_hasty=is_hasty)
        try:
            with contextlib.closing(outcomes):
                for name, outcome in outcomes:
                    if outcome.status is Status.FAILED:
                        return name
        except RanksFailedError:
            return f"the end of {world}"
    return ""


def _fail_units(framework: str, path: str) -> bool:
    """Tells whether a unit test fails with these sources; one that does not end has failed."""
    tests = [f"packages/{name}/tests/unit" for name in PACKAGES[framework]]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((path, str(ROOT))), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(_SECONDS) != 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return True


def know(framework: str, folder: Path) -> lines.Lines:
    """Returns which cases run which lines; runs the suite once if the folder does not have it."""
    if not any(folder.glob("*.json")):
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[lines.VARIABLE] = str(folder)
        runner.run(framework, registry.load(framework), print)
        del os.environ[lines.VARIABLE]
    return lines.read(folder)


def table(results: Sequence[Mapping[str, object]]) -> str:
    """Returns how many of each kind were noticed by what."""
    verdicts = ("conformance", "unit tests", "survived")
    counts = collections.Counter((each["kind"], each["verdict"]) for each in results)
    rows = [f"{'kind':20}" + "".join(f"{verdict:>14}" for verdict in verdicts)]
    for kind in sorted({str(each["kind"]) for each in results}):
        rows.append(f"{kind:20}" + "".join(f"{counts[kind, verdict]:14}" for verdict in verdicts))
    total = [sum(count for (_, v), count in counts.items() if v == verdict) for verdict in verdicts]
    rows.append(f"{'all':20}" + "".join(f"{count:14}" for count in total))
    return "\n".join(rows)


def main() -> int:
    """Tries a sample; prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=PACKAGES, required=True)
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--out", type=Path, help="file for what became of each")
    parser.add_argument("--lines", type=Path, help="folder that keeps which cases run which lines")
    parser.add_argument(
        "--mutants", type=Path, help="file of the sample: made, and nothing tried, if it is missing"
    )
    parser.add_argument(
        "--without-units", action="store_true", help="do not try survivors with the unit tests"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lines-") as folder:
        known = by_particularity(know(options.framework, options.lines or Path(folder)))
    if options.mutants and options.mutants.exists():
        sample = [Mutant(**each) for each in json.loads(options.mutants.read_text("utf-8"))]
    else:
        from conformance import operators

        sample = operators.sample(options.framework, known, options.sample, options.seed)
        if options.mutants:
            every = [dataclasses.asdict(each) for each in sample]
            options.mutants.write_text(json.dumps(every), encoding="utf-8")
            return 0
    results: list[dict[str, object]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        tried = functools.partial(
            attempt, options.framework, known=known, with_units=not options.without_units
        )
        for result in pool.map(tried, sample):
            results.append(result)
            print(len(results), result["verdict"], result["file"], result["line"], flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
