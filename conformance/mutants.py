"""Breaks the packages as a machine would, and counts what the suite notices.

    python -m conformance.mutants --framework torch --sample 300 --jobs 8 --out out/mutants.json

Each mutant changes one line that cases run (``conformance.lines`` tells which, from one run of the
suite) and is tried with the most particular of these cases, then with more of them. One that
survives is tried with the package's unit tests. A sample with one seed is the same sample.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
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

#: How many cases a mutant is tried with at first, and how many if these do not notice.
_FEW, _MANY = 6, 40
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


def by_particularity(known: lines.Lines) -> lines.Lines:
    """Returns the cases of each line, those first that run the fewest lines."""
    weight = collections.Counter(
        pair for numbers in known.values() for pairs in numbers.values() for pair in pairs
    )
    return {
        file: {
            number: sorted(pairs, key=lambda pair: (weight[pair], pair))
            for number, pairs in numbers.items()
        }
        for file, numbers in known.items()
    }


def attempt(framework: str, mutant: Mutant, known: lines.Lines) -> dict[str, object]:
    """Tries a mutant; returns it with what noticed it, if anything did.

    Args:
        framework: whose package it is.
        mutant: what is tried.
        known: the cases of each line, in the order in which they are run.
    """
    pairs = known[mutant.file][mutant.line]
    with sources(framework) as (path, files):
        (file,) = (place / mutant.file for place in files if (place / mutant.file).exists())
        file.write_text(mutant.text, encoding="utf-8")
        found: dict[str, object] = {**dataclasses.asdict(mutant), "cases": len(pairs)}
        del found["text"]
        for part in (pairs[:_FEW], pairs[_FEW:_MANY]):
            if part and _is_noticed(framework, part, path):
                return {**found, "verdict": "conformance"}
        tests = [f"packages/{name}/tests/unit" for name in PACKAGES[framework]]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        verdict = "survived" if _run(command, path) == 0 else "unit tests"
    return {**found, "verdict": verdict}


def _is_noticed(framework: str, pairs: Sequence[tuple[str, str]], path: str) -> bool:
    command = [sys.executable, "-m", "conformance.mutants", "--framework", framework]
    return _run([*command, "--try", json.dumps(pairs)], path) != 0


def _run(command: Sequence[str], path: str) -> int:
    """Returns an exit code; a program that does not end has failed."""
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
            return process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return -9


def try_pairs(framework: str, pairs: Sequence[tuple[str, str]]) -> int:
    """Runs cases, each in one world; returns 1 if one fails."""
    cases = registry.load(framework)
    wanted: dict[str, list[str]] = {}
    for world, name in pairs:
        wanted.setdefault(world, []).append(name)
    for world, names in wanted.items():
        here = {name: dataclasses.replace(cases[name], worlds=(world,)) for name in names}
        outcomes = runner.run(framework, here)
        if any(each.status is Status.FAILED for each in outcomes.values()):
            return 1
    return 0


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
    parser.add_argument("--try", dest="pairs", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pairs:
        return try_pairs(options.framework, json.loads(options.pairs))
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
        for result in pool.map(lambda each: attempt(options.framework, each, known), sample):
            results.append(result)
            print(len(results), result["verdict"], result["file"], result["line"], flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
