"""Trains a population of Keras models split and whole: ``python packages/smp-tf/tests/population``.

Exact: the numbers are those of TensorFlow alone up to rounding. Refused: an error of the library
that says why. Wrong: anything else.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "multiproc"))

import members
from tf_beside import compare
from tf_worlds import MICROBATCHES, PLAIN, world

from smdistributed.modelparallel.common.testing import RanksFailedError, Worlds

TOLERANCE = 1e-4
_REASONS = ("UnsupportedError", "PartitionError", "NotPartitionedError", "OutsideStepError")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="members; all if none is given")
    parser.add_argument("--partitions", type=int, default=2, choices=[2, 4])
    parser.add_argument("--pipeline", default="interleaved", choices=["interleaved", "simple"])
    parser.add_argument("--seconds", type=float, default=200, help="time limit of a member (200)")
    options = parser.parse_args()
    ways = world(
        options.partitions,
        pipeline_parallel_degree=options.partitions,
        pipeline=options.pipeline,
        microbatches=MICROBATCHES,
    )
    counts: Counter[str] = Counter()
    pool = Worlds()
    try:
        for name in options.names or members.MEMBERS:
            begin = time.monotonic()
            (expected,) = pool.run(PLAIN, members.run, name, True, timeout=options.seconds)
            try:
                found = pool.run(ways, members.run, name, False, timeout=options.seconds)
                compare(found, expected, TOLERANCE)
                verdict, reason = "exact", ""
            except RanksFailedError as error:
                reason = str(error).splitlines()[0]
                verdict = "refused" if any(each in reason for each in _REASONS) else "wrong"
            except AssertionError as error:
                verdict, reason = "wrong", " ".join(str(error).split())[:200]
            counts[verdict] += 1
            print(f"{verdict:8} {name:32} {time.monotonic() - begin:5.0f} s  {reason}", flush=True)
    finally:
        pool.close()
    print(", ".join(f"{verdict} {counts[verdict]}" for verdict in ("exact", "refused", "wrong")))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
