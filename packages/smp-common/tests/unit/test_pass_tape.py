"""What parts of a microbatch hold, by its tape."""

from __future__ import annotations

import dataclasses
import json

from smdistributed.modelparallel.common.planning.pass_memory import PassMemory
from smdistributed.modelparallel.common.planning.pass_tape import (
    BackwardTape,
    Keeping,
    Memory,
    PassTape,
    Product,
    merged,
    without,
)

#: Two products in a row, each of which makes 10 bytes on its way and keeps 3 of what it is given;
#: their backward passes are operations 0 and 1, and 2 and 3, of which each second one makes 5.
TAPE = PassTape(
    4,
    (
        Memory(10, 0, uses=(1,)),
        Memory(3, 1, uses=(2,), kept=(Keeping(1, 4),)),
        Memory(10, 2, uses=(3,)),
        Memory(3, 3, kept=(Keeping(3, 2),)),
    ),
    (Product(1, (1,), 2, 7), Product(3, (3,), 2, 7)),
    BackwardTape((3, 2, 1, 0), {1: 5, 2: -5, 3: 5, 4: -5}),
)


def test_a_part_holds_what_its_operations_meet() -> None:
    first, second = TAPE.memory([(0, 2)]), TAPE.memory([(2, 4)])
    assert first == PassMemory(3, 13, 8, 10, 5, 7)
    # It reads what the first one keeps, which is there before it begins.
    assert second == PassMemory(3, 13, 8, 10, 5, 7)
    assert TAPE.memory([(0, 4)]) == PassMemory(6, 16, 11, 15, 10, 7)
    assert TAPE.memory([(0, 1), (1, 2)]) == first
    assert TAPE.memory([]) == PassMemory()


def test_what_an_object_holds_stays_where_all_else_is_computed_again() -> None:
    memories = (TAPE.memories[0]._replace(is_held=True), *TAPE.memories[1:])
    holding = dataclasses.replace(TAPE, memories=memories)
    assert holding.memory([(0, 2)]).again(4).kept == 4 + 10
    assert holding.memory([(2, 4)]).again(4).kept == TAPE.memory([(0, 2)]).again(4).kept == 4
    assert PassTape.from_document(json.loads(json.dumps(dataclasses.asdict(holding)))) == holding


def test_several_backward_passes_are_met_by_their_places() -> None:
    twice = BackwardTape((3, 1, 3, 0), {})
    assert twice.within([(2, 4)]) == [0, 2]
    assert twice.within([(0, 2)]) == [1, 3]
    assert twice.most([(2, 4)], [(1, 6), (None, 2)]) == 8
    assert BackwardTape().most([(0, 4)], []) is None


def test_a_tape_is_read_as_it_was_written() -> None:
    assert PassTape.from_document(json.loads(json.dumps(dataclasses.asdict(TAPE)))) == TAPE


def test_spans_are_put_together_and_taken_apart() -> None:
    assert merged([(4, 6), (0, 2), (2, 3), (5, 5)]) == [(0, 3), (4, 6)]
    assert without([(0, 10)], [(2, 3), (5, 8)]) == [(0, 2), (3, 5), (8, 10)]
    assert without([(0, 2), (4, 6)], [(1, 5)]) == [(0, 1), (5, 6)]
    assert without([(0, 2)], [(0, 4)]) == []
