"""Arguments of a step that lie on the host go to the device, and nothing else changes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.microbatch import SplitRules
from smdistributed.modelparallel.torch.stepping.moving import NOTHING, DeviceCopies, Mover

META = torch.device("meta")


class HostCopies(DeviceCopies):
    """Stands in for those of a GPU: copies have memory, so that it can be written back."""

    waited = 0

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [each.clone() for each in tensors]

    def wait(self) -> None:
        self.waited += 1


def mover(function: Callable[..., Any], copies: DeviceCopies | None = None, **rules: Any) -> Mover:
    return Mover(META, SplitRules(inspect.signature(function), **rules), copies)


def step(model: Any, x: Any, **others: Any) -> None:
    """The step function."""


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor
    name: str


def test_tensors_go_wherever_they_are_in_what_is_split() -> None:
    x = torch.ones(4)
    given = {"a": [x, Batch(torch.ones(4, 2), "b")], "c": 3}
    (_, moved), _ = mover(step).move((None, given), {})[0]
    assert moved["a"][0].device == moved["a"][1].tokens.device == META
    assert (moved["a"][1].name, moved["c"]) == ("b", 3)
    assert x.device.type == "cpu"
    assert given["a"][0] is x


def test_the_same_tensor_twice_is_one_tensor_on_the_device() -> None:
    x = torch.ones(4)
    (_, moved), others = mover(step).move((None, x), {"y": x})[0]
    assert moved is others["y"]


def test_parameters_and_models_stay() -> None:
    weight, net = torch.nn.Parameter(torch.ones(4)), torch.nn.Linear(1, 1)
    args, others = mover(step).move((net, weight), {"y": torch.ones(4)})[0]
    assert args == (net, weight)
    assert others["y"].device == META


def test_all_stays_where_the_script_has_put_a_tensor_on_a_device() -> None:
    given = (None, torch.ones(4, device=META)), {"lengths": torch.ones(4)}
    call, moved = mover(step).move(*given)
    assert call == given
    assert not moved.copies


def test_an_argument_that_is_not_split_goes_too_but_keeps_its_container() -> None:
    kept = [torch.ones(4)]
    rules = {"non_split_inputs": ["mask", "kept"]}
    given = {"mask": torch.ones(3), "kept": kept}
    (_, x), others = mover(step, **rules).move((None, torch.ones(4)), given)[0]
    assert x.device == others["mask"].device == META
    assert others["kept"] is kept


def test_on_a_host_without_devices_nothing_is_looked_at() -> None:
    given = (None, torch.ones(4)), {}
    alone = Mover(torch.device("cpu"), SplitRules(inspect.signature(step)))
    call, moved = alone.move(*given)
    assert call == given
    assert moved is NOTHING


def test_gradients_reach_the_tensor_of_the_script() -> None:
    x = torch.ones(4, requires_grad=True)
    (_, copy), _ = mover(step, HostCopies(META)).move((None, x), {})[0]
    for part in copy.chunk(2):
        part.square().sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 2.0))


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_written_is_the_scripts(inference: bool) -> None:
    x, y, copies = torch.ones(4), torch.ones(4), HostCopies(META)
    moves = mover(step, copies)
    with torch.inference_mode(inference):
        ((_, copy), _), moved = moves.move((None, x), {"y": y})
        copy.narrow(0, 2, 2).mul_(3)
        before = y._version
        moves.end(moved)
    assert x.tolist() == [1, 1, 3, 3]
    assert y._version == before
    assert copies.waited == 1


def test_writes_that_another_argument_would_show_are_refused() -> None:
    x = torch.ones(4, 3)
    moves = mover(step, HostCopies(META))
    ((_, copy), _), moved = moves.move((None, x[:, :-1]), {"y": x[:, 1:]})
    moves.end(moved)
    copy.mul_(2)
    with pytest.raises(UnsupportedError, match=r"shares its memory.*Change a copy"):
        moves.end(moved)
