"""Rank arithmetic: global rank <-> coordinates, and the members of every group.

A placement is a word of the letters D (reduced data), P (pipeline) and T (tensor). The word reads
a global rank as a three-digit number whose digits are the coordinates: the left-most letter is the
slowest digit, the right-most the fastest. Everything here follows from that, without a loop over
the ranks of the job and without any communication.

A group keeps some of the digits fixed and lets the others vary:

    group      fixed   varies
    WORLD              D P T
    MP_GROUP   D       P T
    DP_GROUP   P       D T
    PP_GROUP   D T     P
    TP_GROUP   D P     T
    RDP_GROUP  P T     D

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

_VARYING = {
    CommGroup.WORLD: "DPT",
    CommGroup.MP_GROUP: "PT",
    CommGroup.DP_GROUP: "DT",
    CommGroup.PP_GROUP: "P",
    CommGroup.TP_GROUP: "T",
    CommGroup.RDP_GROUP: "D",
}


class Coordinates(NamedTuple):
    """Where one process stands in the job.

    ``mp_rank`` and ``dp_rank`` follow from the other three: they are positions in MP_GROUP and
    DP_GROUP.
    """

    pp_rank: int
    tp_rank: int
    rdp_rank: int
    mp_rank: int
    dp_rank: int


@dataclass(frozen=True)
class Topology:
    """How the processes of a job are arranged.

    Args:
        size: number of processes of the job, over all hosts.
        pp_size: pipeline_parallel_degree.
        tp_size: tensor_parallel_degree.
        placement: ``cluster`` (DPT), ``spread`` (TPD), or a word of the letters D, P and T.

    Raises:
        ConfigError: a size below 1, a size that pp_size x tp_size does not divide, or an unknown
            placement.
    """

    size: int
    pp_size: int = 1
    tp_size: int = 1
    placement: str = "cluster"

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least 1, got {value}."
            for name, value in (
                ("the number of processes", self.size),
                ("pipeline_parallel_degree", self.pp_size),
                ("tensor_parallel_degree", self.tp_size),
            )
            if value < 1
        ]
        if not problems and self.size % (self.pp_size * self.tp_size):
            problems.append(describe_indivisible(self.size, self.pp_size, self.tp_size))
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
        """Number of ranks that hold the same partition and the same slices."""
        return self.size // (self.pp_size * self.tp_size)

    @property
    def dp_size(self) -> int:
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
        )

    def rank_of(self, pp: int, tp: int, rdp: int) -> int:
        """The global rank at the given coordinates.

        Raises:
            ValueError: a coordinate is out of range.
        """
        digit = {"P": pp, "T": tp, "D": rdp}
        for letter, value in digit.items():
            if not 0 <= value < self._bases[letter]:
                raise ValueError(
                    f"coordinate {letter} must be between 0 and {self._bases[letter] - 1}, "
                    f"got {value}."
                )
        return self._read("DPT", digit)

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
            degree: how many share them; it divides ``rdp_size``.
        """
        members = self.members(CommGroup.RDP_GROUP, rank)
        start = self.coordinates(rank).rdp_rank // degree * degree
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
        return "".join(letter for letter in "DPT" if letter not in _VARYING[group])

    @cached_property
    def _bases(self) -> dict[str, int]:
        """How many values the coordinate of each letter takes."""
        return {"P": self.pp_size, "T": self.tp_size, "D": self.rdp_size}

    def _stride(self, letter: str) -> int:
        """Distance in global rank between two neighbours along this letter."""
        stride = 1
        for faster in self.word[self.word.index(letter) + 1 :]:
            stride *= self._bases[faster]
        return stride

    def _digits(self, rank: int) -> dict[str, int]:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank must be between 0 and {self.size - 1}, got {rank}.")
        digit = {}
        for letter in reversed(self.word):
            rank, digit[letter] = divmod(rank, self._bases[letter])
        return digit

    def _read(self, letters: str, digit: dict[str, int]) -> int:
        """The number that the digits of some letters form, read in the order of the word."""
        number = 0
        for letter in self.word:
            if letter in letters:
                number = number * self._bases[letter] + digit[letter]
        return number

    def _offsets(self, letters: str) -> list[int]:
        """Ranks reached from rank 0 by varying only these letters, ascending."""
        steps = [
            range(0, self._bases[letter] * self._stride(letter), self._stride(letter))
            for letter in self.word
            if letter in letters
        ]
        # The slowest letter varies in the outer loop, so the sums come out in ascending order.
        return [sum(step) for step in itertools.product(*steps)]


def describe_indivisible(
    size: int, pp: int, tp: int, *, pp_name: str = "pipeline_parallel_degree"
) -> str:
    """The problem of a size that pp x tp does not divide, with the nearest values that work.

    Args:
        size: number of processes of the job.
        pp: pipeline parallel degree.
        tp: tensor parallel degree.
        pp_name: how the user spelled the first degree.
    """
    mp_size = pp * tp
    below = size - size % mp_size
    sizes = [n for n in (below, below + mp_size) if n]
    fixes = [f"start {_either(sizes)} processes"]
    if size % tp == 0:
        fixes.append(f"set {pp_name} to {_either(_near_divisors(size // tp, pp))}")
    if tp > 1 and size % pp == 0:
        fixes.append(f"set tensor_parallel_degree to {_either(_near_divisors(size // pp, tp))}")
    return (
        f"the number of processes ({size}, over all hosts) must be a multiple of {pp_name} ({pp}) "
        f"x tensor_parallel_degree ({tp}) = {mp_size}: {', or '.join(fixes)}."
    )


def _near_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of ``number`` next to ``wanted``, which is none of them."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below = [n for n in divisors if n < wanted]
    above = [n for n in divisors if n > wanted]
    return below[-1:] + above[:1]


def _either(numbers: Iterable[int]) -> str:
    return " or ".join(str(n) for n in numbers)
