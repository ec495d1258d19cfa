"""Trains a population of Keras models split and whole: ``python packages/smp-tf/tests/population``.

Exact: the numbers are those of TensorFlow alone up to rounding. Refused: an error of the library
that says why. Unclear: another error. Hung: no end in time. Wrong: other numbers. Invalid:
TensorFlow alone fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "multiproc"))

import members
from tf_beside import Found, compare
from tf_worlds import MICROBATCHES, PLAIN, world

from smdistributed.modelparallel.common.testing import RanksFailedError, World, Worlds

TOLERANCE = 1e-4
#: Errors of the library that say a rule, beside others that only say what happened.
_REASONS = (
    *("UnsupportedError", "PartitionError", "NotPartitionedError", "OutsideStepError"),
    *("CheckpointError", "ConfigError"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="members; all if none is given")
    degrees, kinds = [2, 4], ["interleaved", "simple"]
    parser.add_argument("--partitions", type=int, choices=degrees, help="both if not given")
    parser.add_argument("--pipeline", choices=kinds, help="both if not given")
    parser.add_argument("--by-hand", action="store_true", help="by smp.partition, not automatic")
    parser.add_argument("--seconds", type=float, default=200, help="time limit of a member (200)")
    options = parser.parse_args()
    by_hand = {"auto_partition": False, "default_partition": 0} if options.by_hand else {}
    ways = {
        (partitions, pipeline): world(
            partitions,
            pipeline_parallel_degree=partitions,
            pipeline=pipeline,
            microbatches=MICROBATCHES,
            **by_hand,
        )
        for partitions in ([options.partitions] if options.partitions else degrees)
        for pipeline in ([options.pipeline] if options.pipeline else kinds)
    }
    counts: Counter[str] = Counter()
    pool = Worlds(most_ranks=1 + sum(way.num_ranks for way in ways.values()))
    try:
        for name in options.names or members.MEMBERS:
            try:
                (expected,) = pool.run(PLAIN, members.run, name, True, timeout=options.seconds)
            except RanksFailedError as error:
                counts["invalid"] += 1
                print(f"{'invalid':8} {name:32} {str(error).splitlines()[0]}", flush=True)
                continue
            for way, one in ways.items():
                begin = time.monotonic()
                verdict, reason = _tried(pool, one, name, expected, options.seconds)
                counts[verdict] += 1
                words = (f"{verdict:8}", f"{name:32}", *way, f"{time.monotonic() - begin:5.0f} s")
                print(*words, "", reason, flush=True)
    finally:
        pool.close()
    bad = ("unclear", "hung", "wrong", "invalid")
    print(", ".join(f"{verdict} {counts[verdict]}" for verdict in ("exact", "refused", *bad)))
    return 1 if any(counts[verdict] for verdict in bad) else 0


def _tried(pool: Worlds, way: World, name: str, expected: Found, seconds: float) -> tuple[str, str]:
    """Returns the verdict on a member in a world, and the reason if it is not exact."""
    try:
        compare(pool.run(way, members.run, name, False, timeout=seconds), expected, TOLERANCE)
    except RanksFailedError as error:
        reason = str(error).splitlines()[0]
        if "no end within" in reason or "timed out" in reason:
            return "hung", reason
        return ("refused" if any(each in reason for each in _REASONS) else "unclear"), reason
    except AssertionError as error:
        return "wrong", " ".join(str(error).split())[:200]
    return "exact", ""


if __name__ == "__main__":
    sys.exit(main())
