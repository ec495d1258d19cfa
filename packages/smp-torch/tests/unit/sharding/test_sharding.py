"""How parameters are cut, which are gathered together, and how ranks agree."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.pieces import Rectangle, covers
from smdistributed.modelparallel.common.topology import Topology
from smdistributed.modelparallel.torch.sharding.agreement import Agreement, Course, Required
from smdistributed.modelparallel.torch.sharding.layout import (
    UnitLayout,
    block,
    group_names,
    is_cut,
)

SHAPES = [(8,), (7, 3), (1, 9), (2, 1, 5), (3,), (1, 1)]


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5])
def test_blocks_cover_a_parameter_once(degree: int) -> None:
    for shape in SHAPES:
        parts = [block(shape, degree, index) for index in range(degree)]
        assert covers(parts, Rectangle.whole(shape))
        for one, other in itertools.combinations(parts, 2):
            assert one.intersection(other) is None


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_shards_of_all_ranks_are_the_parameters(degree: int) -> None:
    layout = UnitLayout(tuple(SHAPES), degree)
    shards = torch.full((degree, layout.width), float("nan"))
    memory = torch.arange(float(layout.num_elements))
    whole = layout.views(memory)
    for number, part, values in layout.blocks(shards):
        values.copy_(whole[number][part.within(Rectangle.whole(SHAPES[number]))])
    again = layout.views(torch.full_like(memory, float("nan")))
    for number, part, values in layout.blocks(shards):
        again[number][part.within(Rectangle.whole(SHAPES[number]))] = values
    for one, other in zip(whole, again, strict=True):
        assert one.equal(other)


def test_small_ones_and_other_types_stay_whole() -> None:
    assert is_cut((4, 4), torch.float32, 16)
    assert not is_cut((4, 4), torch.float32, 17)
    assert not is_cut((4, 4), torch.int64, 0)
    assert not is_cut((), torch.float32, 0)


def test_units_are_the_largest_modules_that_fit() -> None:
    sizes = [
        ("token.weight", 50),
        *((f"blocks.{n}.{name}", 10) for n in range(3) for name in ("a.weight", "b.weight")),
        ("scale", 1),
        ("head.weight", 12),
    ]
    assert group_names(sizes, 20) == [
        ["token.weight"],
        *([f"blocks.{n}.a.weight", f"blocks.{n}.b.weight"] for n in range(3)),
        ["scale"],
        ["head.weight"],
    ]
    for budget in (1, 10, 15, 60, 1000):
        units = group_names(sizes, budget)
        assert [name for unit in units for name in unit] == [name for name, _ in sizes]
        known = dict(sizes)
        assert all(len(unit) == 1 or sum(map(known.get, unit)) <= budget for unit in units)


def test_sharding_groups_are_consecutive() -> None:
    for pp, tp, rdp, degree in ((1, 1, 4, 2), (2, 1, 4, 2), (1, 2, 4, 4), (2, 2, 6, 3)):
        topology = Topology(pp * tp * rdp, pp, tp)
        groups = {topology.sharding_group(rank, degree) for rank in range(topology.size)}
        assert sorted(rank for group in groups for rank in group) == list(range(topology.size))
        for group in groups:
            places = [topology.coordinates(rank) for rank in group]
            first = places[0].rdp_rank
            assert first % degree == 0
            assert [each.rdp_rank for each in places] == list(range(first, first + degree))
            assert len({(each.pp_rank, each.tp_rank) for each in places}) == 1


class Table:
    """Where the threads of a test compare numbers."""

    def __init__(self, size: int) -> None:
        self._rows: list[list[int]] = [[] for _ in range(size)]
        self._barrier = threading.Barrier(size, timeout=60)

    def compare(self, rank: int, numbers: Sequence[int]) -> list[list[int]]:
        self._rows[rank] = list(numbers)
        self._barrier.wait()
        found = [list(row) for row in self._rows]
        self._barrier.wait()
        return found


class Seat:
    """One rank at a table."""

    def __init__(self, table: Table, rank: int) -> None:
        self.compare = lambda numbers: table.compare(rank, numbers)


def ranks(*scripts: Callable[[Agreement, Course], list[object]]) -> list[list[object]]:
    """Lets each rank run something; returns what came of it."""
    table = Table(len(scripts))
    found: list[list[object]] = [[] for _ in scripts]

    def run(rank: int) -> None:
        seat: Any = Seat(table, rank)
        course = Course(seat)
        agreement = Agreement(
            seat, range(len(scripts)), course, lambda kind, number: f"needs {number}"
        )
        found[rank] = scripts[rank](agreement, course)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(scripts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def meetings(*wishes: list[tuple[Required, int, tuple[int, ...]]]) -> list[list[object]]:
    """Lets each rank wish one thing after the other; returns what came of it."""

    def wishing(own: list[tuple[Required, int, tuple[int, ...]]], agreement: Agreement) -> Any:
        found: list[object] = []
        for wish in own:
            try:
                found.append(agreement.meet(*wish))
            except SMPError as error:
                return [*found, str(error)]
        return found

    return ranks(*(lambda agreement, _, own=own: wishing(own, agreement) for own in wishes))


GATHER, NOTHING, END = Required.GATHER, Required.NOTHING, Required.END_OF_PASS


def test_ranks_that_wish_the_same_go_on_together() -> None:
    wish = [(GATHER, 3, (1, 4, 5)), (NOTHING, 0, (1, 6)), (END, 0, ())]
    assert meetings(wish, wish) == [[(1, 4, 5), (1, 6), ()]] * 2


def test_what_only_some_wish_is_left_out() -> None:
    both = (GATHER, 3, (1, 4))
    assert meetings([both], [(GATHER, 3, (1, 5))]) == [[(1,)], [(1,)]]
    one = [(NOTHING, 0, (2, 7)), (NOTHING, 0, (2, 8)), both]
    assert meetings(one, [both]) == [[(), (), (1, 4)], [(1, 4)]]


def test_ranks_launch_what_was_captured_together_or_not_at_all() -> None:
    def confirms(agreement: Agreement, course: Course) -> list[object]:
        found: list[object] = [course.confirm(is_as_recorded=True)]
        return [*found, *([] if found[0] else [agreement.meet(GATHER, 3, (1, 4))])]

    def ends_otherwise(agreement: Agreement, course: Course) -> list[object]:
        return [course.confirm(is_as_recorded=False), agreement.meet(GATHER, 3, (1, 4))]

    def needs(agreement: Agreement, course: Course) -> list[object]:
        found = agreement.meet(GATHER, 3, (1, 4))
        return [course.confirm(is_as_recorded=False), found]

    def wishes(agreement: Agreement, course: Course) -> list[object]:
        return [*needs(agreement, course), agreement.meet(NOTHING, 0, (2,))]

    def confirms_and_wishes(agreement: Agreement, course: Course) -> list[object]:
        return [*confirms(agreement, course), agreement.meet(NOTHING, 0, (2,))]

    other_way = [False, (1, 4)]
    assert ranks(confirms, confirms, confirms) == [[True]] * 3
    for other in (needs, ends_otherwise):
        assert ranks(confirms, other, confirms) == [other_way] * 3
    assert ranks(needs, needs) == [other_way] * 2
    assert ranks(confirms_and_wishes, wishes) == [[*other_way, (2,)]] * 2


def test_what_is_captured_is_assumed_to_be_wished_by_all() -> None:
    def captures(agreement: Agreement, course: Course) -> list[object]:
        course.assumed = []
        found = [agreement.meet(GATHER, 3, (1, 4)), agreement.compare([7])]
        return [found, course.assumed]

    # Nobody is waited for: the other rank does nothing.
    found, _ = ranks(captures, lambda agreement, course: [])
    assert found == [[(1, 4), [[7], [7]]], [(GATHER, 3, 1, 4), (7,)]]


def test_ranks_that_need_different_things_are_told() -> None:
    for said in meetings([(GATHER, 3, ())], [(GATHER, 4, ())]):
        assert "rank 0 needs 3; rank 1 needs 4" in str(said)
    for said in meetings([(GATHER, 3, ())], [(NOTHING, 0, (1,)), (END, 0, ())]):
        assert "in the same order" in str(said[-1])


def test_shards_are_as_long_as_the_longest() -> None:
    assert UnitLayout(((7, 3), (8,)), 2).width == 4 * 3 + 4
    assert UnitLayout(((7, 3), (8,)), 2).num_elements == sum(map(math.prod, ((7, 3), (8,))))
