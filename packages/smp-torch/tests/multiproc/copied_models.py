"""What scripts do with copies of a model, and with calls of it between steps: never silently wrong.

A copy is made before the first step or after it, averaged or loaded, and then told or called: how x
when x what is done x what is looked at. Each is a training loop (``loops``).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from loops import EXAMPLES, WIDTH, Act, Loop, Run
from torch import nn
from torch.optim import swa_utils


def _inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, EXAMPLES * WIDTH).view(EXAMPLES, WIDTH)


def _pairs(run: Run) -> list[tuple[Any, Any]]:
    """Returns parameters of the copy, and those of the model."""
    return list(zip(run.kept["copy"].parameters(), run.net.parameters(), strict=True))


@torch.no_grad()
def _averaged(run: Run) -> None:
    for mean, each in _pairs(run):
        mean.mul_(0.5).add_(each, alpha=0.5)


@torch.no_grad()
def _averaged_by_views(run: Run) -> None:
    """Writes to what ``detach`` gives, as ``AveragedModel.update_parameters`` does."""
    pairs = [(mean.detach(), each.detach()) for mean, each in _pairs(run)]
    for mean, each in pairs:
        mean.detach().copy_(0.5 * mean + 0.5 * each)


def _averaged_by_data(run: Run) -> None:
    for mean, each in _pairs(run):
        mean.data = 0.5 * mean.data + 0.5 * each.data


def _zeroed_by_data(run: Run) -> None:
    for mean, each in _pairs(run):
        mean.data = torch.zeros(each.shape)


def _shared(run: Run) -> None:
    """Has the copy see the memory of the model."""
    for mean, each in _pairs(run):
        mean.data = each.data


def _shared_once(run: Run) -> None:
    """Leaves it at that, though the model trains on."""
    if "is shared" not in run.kept:
        run.kept["is shared"] = True
        _shared(run)


def _shared_with_others(run: Run) -> None:
    """Has layers of the copy see the memory of one of the model that another partition may have."""
    for each in run.kept["copy"].blocks:
        each.linear.weight.data = run.net.first.weight.data


def _scaled_by_all(run: Run) -> None:
    """Computes with what all partitions have."""
    largest = torch.stack([each.data.abs().max() for each in run.net.parameters()]).max()
    for mean, each in _pairs(run):
        mean.data = each.data / largest


@torch.no_grad()
def _pulled(run: Run) -> None:
    """Moves the model towards its copy."""
    for mean, each in _pairs(run):
        each.lerp_(mean, 0.25)


@torch.no_grad()
def _crossed(run: Run) -> None:
    """Gives tensors of one partition to those of another."""
    for each in run.net.blocks[1:]:
        each.linear.weight.data = 0.5 * each.linear.weight.data + 0.5 * run.net.first.weight.data


def _loaded(run: Run) -> None:
    run.kept["copy"].load_state_dict(run.model.state_dict())


def _told(run: Run) -> None:
    run.seen += [float(each.detach().norm()) for each in run.kept["copy"].parameters()]


@torch.no_grad()
def _called(run: Run) -> None:
    run.seen += run.kept["copy"].eval()(_inputs()).flatten().tolist()


def _called_with_gradients(run: Run) -> None:
    run.seen += run.kept["copy"].eval()(_inputs()).detach().flatten().tolist()


@torch.no_grad()
def _layer_called(run: Run) -> None:
    run.seen += run.kept["copy"].blocks[2](_inputs()).flatten().tolist()


@torch.no_grad()
def _model_called(run: Run) -> None:
    run.seen += run.model.eval()(_inputs()).flatten().tolist()
    run.model.train()


@torch.no_grad()
def _net_called(run: Run) -> None:
    run.seen += run.net.eval()(_inputs()).flatten().tolist()
    run.net.train()


def _of_a_state(run: Run) -> nn.Module:
    other = copy.deepcopy(run.net)
    other.load_state_dict(run.model.state_dict())
    return other


#: How a copy is made.
MADE: dict[str, Callable[[Run], Any]] = {
    "deepcopy": lambda run: copy.deepcopy(run.net),
    "deepcopy of the model": lambda run: copy.deepcopy(run.model),
    "averaged model": lambda run: swa_utils.AveragedModel(run.net).module,
    "of a state": _of_a_state,
}
#: What is done to it, and then what is looked at.
CHANGED: dict[str, Act] = {
    "as it is": lambda run: None,
    "averaged": _averaged,
    "averaged by views": _averaged_by_views,
    "averaged by data": _averaged_by_data,
    "zeroed by data": _zeroed_by_data,
    "shared": _shared,
    "shared once": _shared_once,
    "shared with others": _shared_with_others,
    "scaled by all": _scaled_by_all,
    "the model pulled": _pulled,
    "the model crossed": _crossed,
    "loaded": _loaded,
}
#: These give tensors of a copy other data. Nobody is told of it where a copy has tensors of torch,
#: made before the library knew the model: a rank that lacks the values refuses to read them.
BY_DATA = (
    *("averaged by data", "zeroed by data", "scaled by all"),
    *("shared", "shared once", "shared with others"),
)
LOOKED: dict[str, Act] = {
    "told": _told,
    "called": _called,
    "called with gradients": _called_with_gradients,
    "a layer called": _layer_called,
    "the model called": _model_called,
    "the net called": _net_called,
}


def _loop(made: str, when: int, changed: str, looked: str) -> Loop:
    def keep(run: Run) -> None:
        run.kept["copy"] = MADE[made](run)

    def after(run: Run) -> None:
        if run.number == when - 1:
            keep(run)
        elif run.number >= when:
            CHANGED[changed](run)
            LOOKED[looked](run)

    return Loop(begin=keep if not when else lambda run: None, after=after)


COPIES = {
    f"{made}, {when}, {changed}, {looked}": _loop(made, number, changed, looked)
    for made, (number, when), changed, looked in itertools.product(
        MADE, enumerate(("before", "after")), CHANGED, LOOKED
    )
    if when != "before" or (made != "of a state" and changed not in BY_DATA)
}
# A kernel that updates many parameters leaves their versions as they are.
COPIES |= {
    f"updated by one kernel, {looked}": Loop(
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
        gradients=LOOKED[looked],
        after=LOOKED[looked],
    )
    for looked in ("the model called", "the net called")
}
