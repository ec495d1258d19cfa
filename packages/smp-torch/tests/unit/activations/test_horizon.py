"""Which activations come next, against a literal list of tasks."""

from __future__ import annotations

import itertools

import pytest

from smdistributed.modelparallel.torch.activations.horizon import Horizon, Pass, Region

#: Forward and backward passes of two parts of a model, by part and microbatch.
ORDERS = {
    "one": "F00 B00 F01 B01",
    "one forward first": "F00 F01 B01 B00",
    "simple": "F00 F01 F02 B00 B01 B02",
    "two parts": "F00 F10 F01 B10 F11 B00 B11 B01",
}


def passes(text: str) -> list[Pass]:
    return [Pass(int(word[1]), int(word[2]), word[0] == "B") for word in text.split()]


def uses(order: list[Pass], regions: dict[int, int]) -> list[tuple[str, object]]:
    """Returns the tasks: each a forward or backward pass of a region, or a pass without one."""
    tasks: list[tuple[str, object]] = []
    for each in order:
        numbers = range(regions[each.part])
        for number in reversed(numbers) if each.is_backward else numbers:
            kind = "use" if each.is_backward else "make"
            tasks.append((kind, (each.part, each.microbatch, number)))
        if not numbers:
            tasks.append(("none", None))
    return tasks


@pytest.mark.parametrize("num_tasks", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("regions", [{0: 3, 1: 2}, {0: 1, 1: 1}, {0: 4, 1: 0}])
def test_what_is_ahead_is_what_the_next_tasks_use(
    order: str, num_tasks: int, regions: dict[int, int]
) -> None:
    plan = passes(ORDERS[order])
    tasks = uses(plan, regions)
    horizon: Horizon[object] = Horizon(num_tasks)
    for step in range(2):
        made: dict[object, Region[object]] = {}
        used: set[object] = set()
        now = itertools.count()
        horizon.begin(plan)
        for position, each in enumerate(plan):
            horizon.enter(position)
            numbers = range(regions[each.part])
            if not numbers:
                next(now)
            for number in reversed(numbers) if each.is_backward else numbers:
                name = each.part, each.microbatch, number
                task = next(now)
                following = tasks[task + 1 : task + 1 + num_tasks]
                if each.is_backward:
                    used.add(name)
                    horizon.use(made[name])
                else:
                    made[name] = horizon.open()
                if not step:
                    continue  # how many regions there are is learned
                is_next = ("use", name) in following and not each.is_backward
                assert horizon.is_near() == is_next
                want = [made[one] for kind, one in following if kind == "use" and one in made]
                assert list(horizon.ahead()) == want


def test_nothing_is_near_while_the_number_of_regions_is_not_known() -> None:
    horizon: Horizon[object] = Horizon(100)
    horizon.begin(passes("F00 B00 F01 B01"))
    horizon.enter(0)
    horizon.open()
    assert not horizon.is_near()
    horizon.enter(1)
    horizon.enter(2)
    horizon.open()
    assert horizon.is_near()


def test_the_first_activation_of_a_backward_pass_comes_when_it_begins() -> None:
    horizon: Horizon[object] = Horizon(1)
    horizon.begin(passes("F00 B00"))
    horizon.enter(0)
    regions = [horizon.open() for _ in range(4)]
    horizon.enter(1)
    assert list(horizon.ahead()) == [regions[3], regions[2]]
