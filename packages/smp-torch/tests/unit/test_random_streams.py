from __future__ import annotations

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.random_streams import RandomStreams


def streams() -> tuple[RandomStreams, nn.Dropout, nn.Dropout]:
    first, second = nn.Dropout(0.5), nn.Dropout(0.5)
    return RandomStreams({"a": first, "b": second}, torch.device("cpu")), first, second


def test_masks_do_not_depend_on_the_order_of_modules_or_microbatches() -> None:
    x = torch.ones(64)
    found = []
    for order in ([0, 1], [1, 0]):
        stream, first, second = streams()
        stream.begin_step(11)
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
    stream.begin_step(1)
    one, two = first(x), first(x)
    stream.begin_step(2)
    three = first(x)
    assert not torch.equal(one, two)
    assert not torch.equal(one, three)
    assert torch.equal(torch.get_rng_state(), state)
    stream.end_step()
    first(x)
    assert not torch.equal(torch.get_rng_state(), state)


def test_a_recomputation_repeats_its_numbers() -> None:
    stream, first, _ = streams()
    x = torch.ones(64)
    stream.begin_step(1)
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
    stream = RandomStreams({"f": module}, torch.device("cpu"))
    stream.begin_step(1)
    state = torch.get_rng_state()
    with pytest.raises(KeyError):
        module()
    assert torch.equal(torch.get_rng_state(), state)
