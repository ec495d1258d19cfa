"""Rank arithmetic: global rank <-> coordinates, and the members of every group.

A placement is a word of the letters D (reduced data), P (pipeline) and T (tensor). C (context) has
its place right of D: ranks that share a sequence are next to each other. The word reads a global
rank as a number whose digits are the coordinates: the left-most letter is the slowest digit, the
right-most the fastest. Everything here follows from that, without a loop over the ranks of the job
and without any communication.

A group keeps some of the digits fixed and lets the others vary:

    group         fixed    varies
    WORLD                  D C P T
    MP_GROUP      D C      P T
    DP_GROUP      C P      D T
    PP_GROUP      D C T    P
    TP_GROUP      D C P    T
    RDP_GROUP     C P T    D
    CP_GROUP      D P T    C
    DP_CP_GROUP   P        D C T
    RDP_CP_GROUP  P T      D C

The last two have the ranks that hold the same partition, and the same slices of it: gradients are
reduced over them.

Source: smd_model_parallel_general.rst, Placement Strategy with Tensor Parallelism;
model-parallel-extended-features-pytorch-ranking-mechanism.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.groups import CommGroup

PLACEMENT_ALIASES = {"cluster": "DPT", "spread": "TPD"}
PLACEMENT_WORDS = ("DPT", "DTP", "PDT", "PTD", "TDP", "TPD")

_LETTERS = "DCPT"
_VARYING = {
    CommGroup.WORLD: _LETTERS,
    CommGroup.MP_GROUP: "PT",
    CommGroup.DP_GROUP: "DT",
    CommGroup.PP_GROUP: "P",
    CommGroup.TP_GROUP: "T",
    CommGroup.RDP_GROUP: "D",
    CommGroup.CP_GROUP: "C",
    CommGroup.DP_CP_GROUP: "DCT",
    CommGroup.RDP_CP_GROUP: "DC",
}


class Coordinates(NamedTuple):
    """Where one process stands in the job.

    ``mp_rank``, ``dp_rank`` and the last two follow from the others: they are positions in the
    groups of these names.
    """

    pp_rank: int
    tp_rank: int
    rdp_rank: int
    mp_rank: int
    dp_rank: int
    cp_rank: int
    dp_cp_rank: int
    rdp_cp_rank: int


@dataclass(frozen=True)
class Topology:
    """How the processes of a job are arranged.

    Args:
        size: number of processes of the job, over all hosts.
        pp_size: pipeline_parallel_degree.
        tp_size: tensor_parallel_degree.
        placement: ``cluster`` (DPT), ``spread`` (TPD), or a word of the letters D, P and T.
        cp_size: context_parallel_degree.

    Raises:
        ConfigError: a size below 1, a size that the product of the degrees does not divide, or an
            unknown placement.
    """

    size: int
    pp_size: int = 1
    tp_size: int = 1
    placement: str = "cluster"
    cp_size: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least 1, got {value}."
            for name, value in (
                ("the number of processes", self.size),
                ("pipeline_parallel_degree", self.pp_size),
                ("tensor_parallel_degree", self.tp_size),
                ("context_parallel_degree", self.cp_size),
            )
            if value < 1
        ]
        if not problems and self.size % (self.pp_size * self.tp_size * self.cp_size):
            problems.append(
                describe_indivisible(self.size, self.pp_size, self.tp_size, self.cp_size)
            )
        if self.placement not in PLACEMENT_ALIASES and self.placement not in PLACEMENT_WORDS:
            problems.append(
                f"placement_strategy must be one of {', '.join(PLACEMENT_ALIASES)}, "
                f"{', '.join(PLACEMENT_WORDS)}, got {self.placement!r}."
            )
        if problems:
            raise ConfigError("\n".join(problems))

    @property
    def word(self) -> str:
        """The placement as three letters, slowest first."""
        return PLACEMENT_ALIASES.get(self.placement, self.placement)

    @property
    def rdp_size(self) -> int:
        """Number of ranks with the same partition, slices and pieces of sequences."""
        return self.rdp_cp_size // self.cp_size

    @property
    def dp_size(self) -> int:
        """Number of ranks with the same partition and the same pieces of sequences."""
        return self.dp_cp_size // self.cp_size

    @property
    def rdp_cp_size(self) -> int:
        """Number of ranks that hold the same partition and the same slices."""
        return self.size // (self.pp_size * self.tp_size)

    @property
    def dp_cp_size(self) -> int:
        """Number of ranks that hold the same partition."""
        return self.size // self.pp_size

    @property
    def mp_size(self) -> int:
        """Number of ranks over which one replica of the model is spread."""
        return self.pp_size * self.tp_size

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of a global rank.

        Raises:
            ValueError: ``rank`` is not a rank of this job.
        """
        digit = self._digits(rank)
        return Coordinates(
            pp_rank=digit["P"],
            tp_rank=digit["T"],
            rdp_rank=digit["D"],
            mp_rank=self._read("PT", digit),
            dp_rank=self._read("DT", digit),
            cp_rank=digit["C"],
            dp_cp_rank=self._read("DCT", digit),
            rdp_cp_rank=self._read("DC", digit),
        )

    def rank_of(self, pp: int, tp: int, rdp: int, cp: int = 0) -> int:
        """The global rank at the given coordinates.

        Raises:
            ValueError: a coordinate is out of range.
        """
        digit = {"P": pp, "T": tp, "D": rdp, "C": cp}
        for letter, value in digit.items():
            if not 0 <= value < self._bases[letter]:
                raise ValueError(
                    f"coordinate {letter} must be between 0 and {self._bases[letter] - 1}, "
                    f"got {value}."
                )
        return self._read(_LETTERS, digit)

    def members(self, group: CommGroup, rank: int) -> tuple[int, ...]:
        """Global ranks, ascending, of the group of this kind that contains ``rank``.

        Raises:
            ValueError: ``rank`` is not a rank of this job.
        """
        # The fixed digits, read as a number, count the groups in the order of their first members.
        return self._groups[group][self._read(self._fixed(group), self._digits(rank))]

    def sharding_group(self, rank: int, degree: int) -> tuple[int, ...]:
        """Global ranks, ascending, that shard parameters together with ``rank``.

        Args:
            rank: a global rank.
            degree: how many share them; it divides ``rdp_cp_size``.
        """
        members = self.members(CommGroup.RDP_CP_GROUP, rank)
        start = self.coordinates(rank).rdp_cp_rank // degree * degree
        return members[start : start + degree]

    def group_rank(self, group: CommGroup, rank: int) -> int:
        """Position of ``rank`` among the members of its group.

        Raises:
            ValueError: ``rank`` is not a rank of this job.
        """
        return self._read(_VARYING[group], self._digits(rank))

    def groups(self, group: CommGroup) -> tuple[tuple[int, ...], ...]:
        """All groups of this kind, in the order of their first members."""
        return self._groups[group]

    @cached_property
    def _groups(self) -> dict[CommGroup, tuple[tuple[int, ...], ...]]:
        # Built once, so that all ranks of a group share one tuple: the tuples of WORLD alone would
        # otherwise hold size x size numbers.
        return {group: self._build_groups(group) for group in CommGroup}

    def _build_groups(self, group: CommGroup) -> tuple[tuple[int, ...], ...]:
        offsets = self._offsets(_VARYING[group])
        return tuple(
            tuple(first + offset for offset in offsets)
            for first in self._offsets(self._fixed(group))
        )

    @staticmethod
    def _fixed(group: CommGroup) -> str:
        return "".join(letter for letter in _LETTERS if letter not in _VARYING[group])

    @cached_property
    def _bases(self) -> dict[str, int]:
        """How many values the coordinate of each letter takes."""
        return {"P": self.pp_size, "T": self.tp_size, "D": self.rdp_size, "C": self.cp_size}

    @cached_property
    def _order(self) -> str:
        """All letters, slowest first."""
        return self.word.replace("D", "DC")

    def _stride(self, letter: str) -> int:
        """Distance in global rank between two neighbours along this letter."""
        stride = 1
        for faster in self._order[self._order.index(letter) + 1 :]:
            stride *= self._bases[faster]
        return stride

    def _digits(self, rank: int) -> dict[str, int]:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank must be between 0 and {self.size - 1}, got {rank}.")
        digit = {}
        for letter in reversed(self._order):
            rank, digit[letter] = divmod(rank, self._bases[letter])
        return digit

    def _read(self, letters: str, digit: dict[str, int]) -> int:
        """The number that the digits of some letters form, read in their order."""
        number = 0
        for letter in self._order:
            if letter in letters:
                number = number * self._bases[letter] + digit[letter]
        return number

    def _offsets(self, letters: str) -> list[int]:
        """Ranks reached from rank 0 by varying only these letters, ascending."""
        steps = [
            range(0, self._bases[letter] * self._stride(letter), self._stride(letter))
            for letter in self._order
            if letter in letters
        ]
        # The slowest letter varies in the outer loop, so the sums come out in ascending order.
        return [sum(step) for step in itertools.product(*steps)]


def describe_indivisible(
    size: int, pp: int, tp: int, cp: int = 1, *, pp_name: str = "pipeline_parallel_degree"
) -> str:
    """The problem of a size that pp x tp x cp does not divide, with the nearest values that work.

    Args:
        size: number of processes of the job.
        pp: pipeline parallel degree.
        tp: tensor parallel degree.
        cp: context parallel degree.
        pp_name: how the user spelled the first degree.
    """
    degrees = {pp_name: pp, "tensor_parallel_degree": tp, "context_parallel_degree": cp}
    product = pp * tp * cp
    below = size - size % product
    fixes = [f"start {_either([n for n in (below, below + product) if n])} processes"]
    for name, degree in degrees.items():
        others = product // degree
        if size % others == 0 and (degree > 1 or name == pp_name):
            fixes.append(f"set {name} to {_either(_near_divisors(size // others, degree))}")
    # Of the third degree, an extension, nothing is said where it is not used.
    shown = [f"{n} ({d})" for n, d in degrees.items() if d > 1 or n != "context_parallel_degree"]
    return (
        f"the number of processes ({size}, over all hosts) must be a multiple of "
        f"{' x '.join(shown)} = {product}: {', or '.join(fixes)}."
    )


def _near_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of ``number`` next to ``wanted``, which is none of them."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below = [n for n in divisors if n < wanted]
    above = [n for n in divisors if n > wanted]
    return below[-1:] + above[:1]


def _either(numbers: Iterable[int]) -> str:
    return " or ".join(str(n) for n in numbers)
