"""Runs scripts by name in a world, and prints what became of each."""

from __future__ import annotations

import argparse
import collections
import time

from scripts.kit import SCRIPTS
from scripts.worlds import WORLDS, outcomes_in
from smdistributed.modelparallel.common.testing import Worlds


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="scripts", description=__doc__)
    parser.add_argument("names", nargs="*", help="scripts; all, if there are none")
    parser.add_argument("--world", choices=WORLDS, default="pp2")
    parser.add_argument("--part", default="0/1", help="which of how many parts, such as 0/4")
    given = parser.parse_args()
    first, parts = map(int, given.part.split("/"))
    names, worlds = (given.names or list(SCRIPTS))[first::parts], Worlds()
    ends: collections.Counter[str] = collections.Counter()
    begin = time.monotonic()
    for name, found in outcomes_in(worlds, given.world, names):
        seconds = time.monotonic() - begin
        print(f"{name} [{given.world}, {seconds:.1f} s] {found}", flush=True)
        ends[found.partition(":")[0]] += 1
        begin = time.monotonic()
    print(f"{given.world}: {dict(ends)} of {sum(ends.values())}")
    worlds.close()


if __name__ == "__main__":
    main()
