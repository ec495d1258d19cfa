"""How much a rounding changes families of ``keras.applications`` in training mode, and a split.

TensorFlow alone, in double precision, trains on a batch, and on the same with each number changed
to its neighbour; then the library trains over two partitions. What a split may change is of the
size of the first change.

With the statistics of batches of two, whose variances are small, deep families make much of a
rounding, and some everything: no tolerance would tell a wrong split from a right one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "multiproc"))

import members
import numpy as np
from tf_beside import Found
from tf_worlds import PLAIN, TWO

from smdistributed.modelparallel.common.testing import Worlds

_SECONDS = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="families; all if none is given")
    options = parser.parse_args()
    names = options.names or members.families()
    print(f"{'':20} loss: one rounding  split    gradients: one rounding  split")
    pool = Worlds()
    try:
        for name in names:

            def run(world: Any, is_alone: bool, is_moved: bool, name: str = name) -> list[Found]:
                body = members.run_in_training_mode
                given = (name, is_alone, is_moved)
                return list(pool.run(world, body, *given, timeout=_SECONDS))

            (plain,), (moved,) = run(PLAIN, True, False), run(PLAIN, True, True)
            ranks = run(TWO, False, False)
            split = Found(ranks[0].same, {key: v for rank in ranks for key, v in rank.own.items()})
            assert split.own.keys() == plain.own.keys()
            figures = [
                *(_of_losses(plain, other) for other in (moved, split)),
                *(_of_gradients(plain, other) for other in (moved, split)),
            ]
            print(f"{name:20}", *(f"{figure:14.0e}" for figure in figures), flush=True)
    finally:
        pool.close()


def _of_losses(one: Found, other: Found) -> float:
    pairs = zip(one.same, other.same, strict=True)
    return max(float(abs(a - b) / abs(a)) for a, b in pairs)


def _of_gradients(one: Found, other: Found) -> float:
    largest = max(float(np.abs(value).max()) for value in one.own.values())
    return max(float(np.abs(one.own[key] - other.own[key]).max()) for key in one.own) / largest


if __name__ == "__main__":
    main()
