"""How many cores a process has depends on those that it may use, and on who shares them."""

from __future__ import annotations

from smdistributed.modelparallel.tensorflow.runtime.cores import Cores


def test_processes_share_what_all_of_them_may_use() -> None:
    shared = [Cores("a", frozenset(range(4)))] * 2
    other = Cores("b", frozenset(range(8)))
    assert shared[0].number_each([*shared, other]) == 2
    assert other.number_each([*shared, other]) == 8


def test_a_process_may_have_cores_of_its_own() -> None:
    bound = [Cores("a", frozenset({2 * rank, 2 * rank + 1})) for rank in range(2)]
    assert bound[0].number_each(bound) == 2


def test_more_processes_than_cores_have_one_each() -> None:
    many = [Cores("a", frozenset({0, 1}))] * 4
    assert many[0].number_each(many) == 1
