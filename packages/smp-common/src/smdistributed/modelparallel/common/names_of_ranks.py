"""How messages name ranks."""

from __future__ import annotations

from collections.abc import Collection


def listed(ranks: Collection[int]) -> str:
    """Returns ascending ranks as in "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    names = ", ".join("-".join(map(str, run)) for run in runs)
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def have(ranks: Collection[int]) -> str:
    """Returns the verb after them, as in "rank 5 has ended" and "ranks 0-2 have ended"."""
    return "has" if len(ranks) == 1 else "have"
