"""Forward hooks that store things are lifted out of modules that stay whole; others are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from recorded import Recorded
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.record.ir import Node
from smdistributed.modelparallel.torch.record.questions.pending import PendingNumber
from smdistributed.modelparallel.torch.record.trace import strays
from smdistributed.modelparallel.torch.record.trace.unknown import Unknown

#: What a layer reads.
SEEN: list[Any] = []


class Layer(nn.Module):
    """May overwrite what the one in it gives, or go by what hooks store."""

    def __init__(self, *, overwrites: bool = False, reads: str = "") -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.overwrites = overwrites
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.overwrites:
            x = torch.relu_(x)
        if self.reads == "value" and x.sum() > 0:
            x = self.inner(x)
        if self.reads == "list":
            x = x * len(SEEN)
        if self.reads == "attribute":
            x = x * getattr(self.inner, "".join(["lat", "est"]), 1)
        return self.outer(x)


def recorded(hook: Callable[..., Any], **facts: Any) -> tuple[Recorded, Callable[[], Node]]:
    """Returns a model with a hook, and what runs a microbatch and returns the first layer."""
    layers = [Layer(**facts), *(Layer() for _ in range(3))]
    net = nn.Sequential(*layers)
    layers[0].inner.register_forward_hook(hook)
    found = Recorded(net, {"0": 0, "1": 0, "2": 1, "3": 1})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).sum()
        found.backward(loss)
        return loss

    def run() -> Node:
        way = found.way(body, torch.zeros(2, 4))
        return next(node for node in way.graph.nodes if node.target is layers[0])

    return found, run


def test_a_number_is_stored_in_each_microbatch_and_the_module_runs_without_the_hook() -> None:
    log: list[Any] = []
    _, run = recorded(lambda module, given, out: log.append((out.norm().item(), out.shape)))
    for number in range(1, 4):
        node = run()
        assert len(log) == number
    assert all(isinstance(each, PendingNumber) for each, _ in log)
    (spot,) = node.outside
    assert spot.table == "_forward_hooks"
    assert len(node.taps) == 1


def test_one_that_is_put_there_for_each_microbatch_is_called() -> None:
    log: list[Any] = []
    found, run = recorded(lambda module, given, out: None)
    inner = found.module[0].inner

    def put(store: list[Any]) -> Any:
        return inner.register_forward_hook(lambda module, given, out: store.append(out.mean()))

    run()
    for number in range(1, 4):
        handle = put(log)
        run()
        handle.remove()
        assert len(log) == number


def test_an_attribute_is_set_for_all() -> None:
    found, run = recorded(lambda module, given, out: setattr(module, "latest", out.max().item()))
    for _ in range(2):
        assert run().outside
        assert isinstance(found.module[0].inner.latest, PendingNumber)


def test_numbers_that_are_known_are_computed_with_as_such() -> None:
    number, other = PendingNumber(tensor=torch.ones(())), PendingNumber(tensor=torch.ones(()))
    assert isinstance(number / 2, PendingNumber)
    number.settle(3.0)
    assert isinstance(number + other, PendingNumber)
    for found in (sum([number, 1]) / 2, abs(-number) - 1, round(number - 1.2)):
        assert type(found) is not PendingNumber
        assert found == 2
    assert np.mean([number, 1.0]) == 2
    torch.testing.assert_close(torch.tensor(np.array([number])), torch.tensor([3.0]).double())


@pytest.mark.parametrize(
    "hook",
    [
        lambda module, given, out: out * 2,
        lambda module, given, out: None,
        lambda module, given, out: SEEN.append(len(out.mul_(2))),
        lambda module, given, out: SEEN.append(len(torch.rand(2))),
    ],
    ids=["changes the result", "only looks", "writes", "draws"],
)
def test_what_is_part_of_the_module_stays_in_it(hook: Any) -> None:
    _, run = recorded(hook)
    assert not run().outside


def test_what_stores_things_that_a_module_around_reads_stays_in_it() -> None:
    _, run = recorded(lambda module, given, out: SEEN.append(1), reads="list")
    assert not run().outside


def test_what_a_module_reads_by_a_name_that_it_makes_up_is_found_by_calling_it() -> None:
    hook = lambda module, given, out: setattr(module, "latest", 2.0)  # noqa: E731
    _, run = recorded(hook, reads="attribute")
    with pytest.raises(UnsupportedError, match=r"Linear\.latest is changed by code outside 0"):
        run()


def test_what_a_module_that_decides_by_values_calls_is_not_known() -> None:
    log: list[int] = []
    _, run = recorded(lambda module, given, out: log.append(len(out)), reads="value")
    with pytest.raises(UnsupportedError, match="decides by the values of its activations"):
        run()


def test_computing_with_what_the_module_overwrites_is_refused() -> None:
    log: list[Any] = []
    _, run = recorded(lambda module, given, out: log.append(out.mean()), overwrites=True)
    with pytest.raises(UnsupportedError, match="writes to afterwards"):
        run()
    found, run = recorded(lambda module, given, out: log.append(out.detach()), overwrites=True)
    run()
    inner = found.module[0].inner
    inner.register_forward_hook(lambda module, given, out: log.append(out.mean()))
    with pytest.raises(UnsupportedError, match="writes to afterwards"):  # it is whole by now
        run()


def test_a_list_that_had_a_tensor_is_where_one_more_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[Any] = []
    _, run = recorded(lambda module, given, out: log.append(("inner", out.mean())))
    run()

    def search(*_: object) -> None:
        raise AssertionError("all of Python was searched")

    monkeypatch.setattr(strays, "settle", search)
    for number in range(2, 4):
        run()
        assert len(log) == number
        assert set(map(type, log)) == {Unknown}
