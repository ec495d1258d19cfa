"""Breaks the implementation on purpose, and holds that the suite notices.

    python -m conformance.mutations --framework torch            # all of them
    python -m conformance.mutations --framework torch sum mean   # those with these words

Each mutation changes one place in a copy of the sources and runs the cases that must notice. A
mutation that survives, or whose place is gone, is a failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conformance.faults import Mutation, tensorflow, torch

ROOT = Path(__file__).parents[1]
PACKAGES = {"torch": ("smp-common", "smp-torch"), "tensorflow": ("smp-common", "smp-tf")}
MUTATIONS = {"torch": torch.MUTATIONS, "tensorflow": tensorflow.MUTATIONS}
_BELOW = Path("smdistributed", "modelparallel")


@contextmanager
def sources(framework: str) -> Iterator[tuple[str, list[Path]]]:
    """Yields a search path of copies of the packages, and where each has its files."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        places = []
        for package in PACKAGES[framework]:
            source = ROOT / "packages" / package / "src"
            target = Path(folder, package)
            shutil.copytree(source, target)
            places.append(target)
        yield os.pathsep.join(map(str, places)), [place / _BELOW for place in places]


@contextmanager
def broken(framework: str, mutation: Mutation) -> Iterator[str]:
    """Yields a search path on which the sources have the fault."""
    with sources(framework) as (path, places):
        (file,) = (each for place in places if (each := place / mutation.file).exists())
        text = file.read_text(encoding="utf-8")
        if text.count(mutation.old) != 1:
            raise SystemExit(
                f"{mutation.name}: {mutation.file} has its place {text.count(mutation.old)} times, "
                "not once: bring the mutation up to date."
            )
        file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        yield path


def is_noticed(framework: str, mutation: Mutation) -> bool:
    """Runs the cases of a mutation; tells whether one failed."""
    with broken(framework, mutation) as path:
        done = subprocess.run(
            [*_RUN, "--framework", framework, "--only", *mutation.cases],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    if done.returncode not in (0, 1) or "cases: " not in done.stdout:
        raise SystemExit(f"{mutation.name}: the suite itself failed:\n{done.stdout}{done.stderr}")
    return done.returncode == 1


_RUN = (sys.executable, "-m", "conformance")


def main() -> int:
    """Tries mutations; returns the exit code: 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--framework", choices=MUTATIONS, required=True)
    parser.add_argument("words", nargs="*", help="in the names of the mutations")
    options = parser.parse_args()
    every = MUTATIONS[options.framework]
    chosen = [each for each in every if all(word in each.name for word in options.words)]
    survivors = []
    for number, mutation in enumerate(chosen, 1):
        noticed = is_noticed(options.framework, mutation)
        survivors += [] if noticed else [mutation.name]
        print(f"{number}/{len(chosen)} {'noticed ' if noticed else 'SURVIVES'} {mutation.name}")
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} noticed")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
