from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.random.keys import StepRandom
from smdistributed.modelparallel.torch.random.modules import RandomStreams
from smdistributed.modelparallel.torch.random.step_seed import StepSeed
from smdistributed.modelparallel.torch.record.costs.meter import Draws

ONE_DRAW = Draws(1, frozenset({F.dropout}))


def keyed(**modules: nn.Module) -> StepRandom:
    """Returns the random numbers of a step in which modules draw."""
    step = StepRandom(torch.device("cpu"))
    RandomStreams(step).add({name: (module, ONE_DRAW) for name, module in modules.items()})
    return step


def streams() -> tuple[StepRandom, nn.Dropout, nn.Dropout]:
    first, second = nn.Dropout(0.5), nn.Dropout(0.5)
    return keyed(a=first, b=second), first, second


def test_masks_do_not_depend_on_the_order_of_modules_or_microbatches() -> None:
    x = torch.ones(64)
    found = []
    for order in ([0, 1], [1, 0]):
        stream, first, second = streams()
        stream.begin(11)
        masks = {}
        for microbatch in order:
            stream.enter_pass(microbatch, backward=False)
            modules = [("a", first), ("b", second)]
            for name, module in modules if microbatch else reversed(modules):
                masks[name, microbatch] = module(x)
        found.append(masks)
    assert all(torch.equal(mask, found[1][key]) for key, mask in found[0].items())
    different = list(found[0].values())
    assert all(
        not torch.equal(one, other) for i, one in enumerate(different) for other in different[:i]
    )


def test_calls_and_steps_differ_and_the_users_generator_is_left_alone() -> None:
    stream, first, _ = streams()
    x = torch.ones(64)
    state = torch.get_rng_state()
    stream.begin(1)
    one, two = first(x), first(x)
    stream.begin(2)
    three = first(x)
    assert not torch.equal(one, two)
    assert not torch.equal(one, three)
    assert torch.equal(torch.get_rng_state(), state)
    stream.end()
    first(x)
    assert not torch.equal(torch.get_rng_state(), state)


def test_a_recomputation_repeats_its_numbers() -> None:
    stream, first, _ = streams()
    x = torch.ones(64)
    stream.begin(1)
    mask = first(x)
    stream.enter_pass(0, backward=True)
    assert torch.equal(first(x), mask)
    stream.enter_pass(0, backward=False)
    first(x)
    stream.enter_pass(0, backward=True)
    with pytest.raises(UnsupportedError, match="a draws random numbers, is called 2 times"):
        first(x)


def test_an_error_in_a_module_puts_the_generator_back() -> None:
    class Failing(nn.Module):
        def forward(self) -> None:
            torch.rand(1)
            raise KeyError("planted")

    module = Failing()
    stream = keyed(f=module)
    stream.begin(1)
    state = torch.get_rng_state()
    with pytest.raises(KeyError):
        module()
    assert torch.equal(torch.get_rng_state(), state)


class Twice(nn.Module):
    """Draws twice, around a child that draws too."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [F.dropout(x, 0.5), self.child(x), F.dropout(x, 0.5)]


def test_several_draws_of_a_module_with_children_are_keyed_one_by_one() -> None:
    module = Twice()
    step = StepRandom(torch.device("cpu"))
    draws = Draws(2, frozenset({F.dropout}))
    RandomStreams(step).add({"m": (module, draws), "c": (module.child, ONE_DRAW)})
    step.begin(3)
    x = torch.ones(64)
    first, child, second = module(x)
    step.begin(3)
    for name, draw, expected in (("m", 1, second), ("c", 0, child), ("m", 0, first)):
        with step.drawing(name, 0, draw):
            assert torch.equal(F.dropout(x, 0.5), expected)
    assert not torch.equal(first, second)


class Unknown(nn.Module):
    """Draws in every way, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Dropout(0.5)
        self.other = nn.Linear(1, 1)
        self.draws = True

    def forward(self, x: torch.Tensor) -> list[Any]:
        if not self.draws:
            return [x]
        self.other(x[:1])
        drawn = [F.dropout(x, 0.5), self.child(x), torch.rand(3), x + random.random()]
        return [*drawn, np.random.rand()]


def learning(module: Unknown) -> StepRandom:
    step = StepRandom(torch.device("cpu"))
    RandomStreams(step).learn({"m": module, "c": module.child, "o": module.other})
    return step


def test_a_first_call_is_keyed_like_those_after_it() -> None:
    module = Unknown()
    step = learning(module)
    x = torch.ones(64)
    found = []
    for _ in range(3):
        step.begin(3)
        found.append(module(x))
        assert step.end()
    for later in found[1:]:
        assert all(map(torch.equal, later[:4], found[0][:4]))
        assert later[4] == found[0][4]
    assert step.draws_in_python(module)
    assert not module.other._forward_hooks  # it draws nothing
    known = StepRandom(torch.device("cpu"))
    draws = Draws(2, frozenset({F.dropout, torch.rand}), True)
    again = Unknown()
    RandomStreams(known).add({"m": (again, draws), "c": (again.child, ONE_DRAW)})
    known.begin(3)
    assert all(map(torch.equal, again(x)[:4], found[0][:4]))


def test_a_rehearsal_teaches_nothing() -> None:
    module = Unknown()
    step = learning(module)
    step.begin(3, rehearsal=True)
    module.draws = False
    module(torch.ones(2))
    module.draws = True
    step.begin(3)
    module(torch.ones(2))
    assert step.end()


def test_a_rehearsal_has_the_keys_that_are_known() -> None:
    module = Unknown()
    step = StepRandom(torch.device("cpu"))
    streams = RandomStreams(step)
    names = {"m": module, "c": module.child, "o": module.other}
    streams.learn(names)
    x = torch.ones(64)
    step.begin(3)
    expected = module(x)
    streams.keep(names)
    step.begin(3, rehearsal=True)
    rehearsed = module(x)
    assert all(map(torch.equal, rehearsed[:4], expected[:4]))
    assert rehearsed[4] == expected[4]


def test_a_draw_without_a_key_is_noticed() -> None:
    module = Unknown()
    step = learning(module)
    for draws in (False, True):
        module.draws = draws
        step.begin(3)
        module(torch.ones(2))
        assert step.end() is not draws


def test_python_and_numpy_are_keyed_where_a_module_draws_from_them() -> None:
    class Choosing(nn.Module):
        def forward(self) -> tuple[float, float]:
            return random.random(), np.random.rand()

    found = []
    for state in (1, 2):
        random.seed(state)
        np.random.seed(state)
        module = Choosing()
        step = StepRandom(torch.device("cpu"))
        RandomStreams(step).add({"m": (module, Draws(in_python=True))})
        before = random.getstate()
        step.begin(3)
        found.append(module())
        assert random.getstate() == before
        assert step.draws_in_python(module)
    assert found[0] == found[1]


def _drawing(step: StepRandom, error: Exception | None) -> None:
    with step.kept_on_host("a module"):
        torch.rand(2)
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [None, ZeroDivisionError()])
def test_what_a_capture_draws_on_the_host_is_put_back(error: Exception | None) -> None:
    before = torch.random.get_rng_state()
    with pytest.raises(UnsupportedError if error is None else ZeroDivisionError):
        _drawing(StepRandom(torch.device("cpu")), error)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_seed_of_a_step_is_drawn_on_the_host_whatever_the_default_device() -> None:
    torch.manual_seed(3)
    before, expected = torch.random.get_rng_state(), StepSeed().number
    torch.manual_seed(3)
    with torch.device("meta"):
        seed = StepSeed()
        assert seed.number == expected
        seed.give_back()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_seed_is_not_given_back_where_something_has_drawn_since() -> None:
    torch.manual_seed(3)
    expected = [StepSeed().number, int(torch.randint(9, ())), int(torch.randint(9, ()))]
    torch.manual_seed(3)
    seed = StepSeed()
    found = [seed.number, int(torch.randint(9, ()))]
    seed.give_back()
    assert [*found, int(torch.randint(9, ()))] == expected


@pytest.mark.parametrize("drops", [True, False])
def test_a_step_has_drawn_where_a_generator_has_moved(drops: bool) -> None:
    stream, first, _ = streams()
    first.train(drops)
    stream.begin(11)
    stream.enter_pass(0, backward=False)
    first(torch.ones(8))
    assert stream.has_drawn == drops
    stream.end()
    stream.begin(12)
    assert not stream.has_drawn


def test_python_decides_alike_for_the_examples_of_all_lanes() -> None:
    """Which layers are left out, say: ranks of a group compute the same ones."""
    found = []
    for lane in range(2):
        step = StepRandom(torch.device("cpu"), 2, lane)
        step.begin(7)
        step.enter_pass(0, backward=False)
        with step.drawing_in_python("layers", 0):
            numbers = random.random(), np.random.rand()
        with step.drawing("layers", 0, 0):
            found.append((numbers, torch.rand(())))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]
