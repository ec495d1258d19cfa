"""A population of loops that compute with parameters between two steps, wherever these are.

Long because it is a table of scripts; see ``loops``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from loops import CLASSES, WIDTH, Act, Loop, Run, _each, _once
from roads import READS, WRITES, Road
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from smdistributed.modelparallel.common.errors import UnsupportedError


def _after(act: Act) -> Loop:
    return Loop(after=torch.no_grad()(act))


def _told(number: Callable[[Run], Any]) -> Loop:
    """Returns a loop that looks at a number after each step."""
    return Loop(after=lambda run: run.seen.append(float(number(run))))


def _blocks(act: Callable[[torch.Tensor], object]) -> Loop:
    """Returns a loop that does something to the weight of each block."""

    def do(run: Run) -> None:
        for block in run.net.blocks:
            act(block.linear.weight)

    return _after(do)


def _rewritten(make: Callable[[torch.Tensor], torch.Tensor]) -> Loop:
    def act(weight: torch.Tensor) -> None:
        weight.data = make(weight.data)

    return _blocks(act)


def _mask(each: torch.Tensor) -> torch.Tensor:
    return (torch.arange(each.numel()).reshape(each.shape) % 3 > 0).to(each.dtype)


def _start(run: Run) -> None:
    for index, block in enumerate(run.net.blocks):
        torch.manual_seed(index)
        block.linear.reset_parameters()
    nn.init.kaiming_normal_(run.net.first.weight)
    nn.init.orthogonal_(run.net.head.weight)
    run.seen.append(torch.rand(()).item())  # the generator stands where it stands in one process


def _frozen(run: Run) -> None:
    run.net.first.weight.requires_grad_(False)
    run.net.head.bias.requires_grad_(False)


def _counted(run: Run) -> None:
    run.seen.append(float(sum(each.grad is not None for each in run.net.parameters())))


def _noise(run: Run) -> None:
    torch.manual_seed(run.number)
    for each in run.net.parameters():
        each.add_(torch.randn_like(each), alpha=0.01)
        each.add_(torch.randn(each.shape), alpha=0.01)
    run.seen.append(torch.rand(()).item())


# What is averaged goes back into the model.


def _averages(run: Run, update: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    if run.number == 0:
        return
    for mean, each in zip(run.kept["means"], run.net.parameters(), strict=True):
        update(mean, each)
        if run.number == 2:
            each.copy_(mean)


def _averaged(update: Callable[[torch.Tensor, torch.Tensor], object]) -> Loop:
    """Returns a loop with averages that were begun before the model was partitioned."""

    def begin(run: Run) -> None:
        run.kept["means"] = [each.detach().clone() for each in run.net.parameters()]

    return Loop(begin=begin, after=torch.no_grad()(lambda run: _averages(run, update)))


def _with_averaged_model(update: Act) -> Loop:
    def begin(run: Run) -> None:
        run.kept["average"] = torch.optim.swa_utils.AveragedModel(copy.deepcopy(run.net))

    def after(run: Run) -> None:
        update(run)
        if run.number == 2:
            average = run.kept["average"].module
            for each, mean in zip(run.net.parameters(), average.parameters(), strict=True):
                each.copy_(mean)

    return Loop(begin=begin, after=torch.no_grad()(after))


def _looked_ahead(run: Run) -> None:
    slow = run.kept.setdefault("slow", [torch.zeros_like(each) for each in run.net.parameters()])
    for one, each in zip(slow, run.net.parameters(), strict=True):
        one.add_(each - one, alpha=0.5)
        each.copy_(one)


# Norms of all.


def _norms(run: Run) -> list[torch.Tensor]:
    return [each.grad.norm() for each in run.net.parameters() if each.grad is not None]


def _norm_by_item(run: Run) -> float:
    total = 0.0
    for each in run.model.parameters():
        if each.grad is not None:
            total += each.grad.data.norm(2).item() ** 2
    return total**0.5


def _clipped(run: Run, norm: Any) -> None:
    coefficient = 0.1 / (norm + 1e-6)
    if coefficient < 1:
        for each in run.net.parameters():
            each.grad.mul_(coefficient)


def _sparsity(run: Run) -> float:
    zeros = sum((each.abs() < 0.1).sum() for each in run.net.parameters())
    return float(zeros) / sum(each.numel() for each in run.net.parameters())


def _gradients(act: Callable[[torch.Tensor, torch.Tensor], object]) -> Loop:
    def do(run: Run) -> None:
        for each in run.net.parameters():
            assert each.grad is not None  # also of those that are elsewhere
            act(each, each.grad)

    return Loop(gradients=torch.no_grad()(do))


def _by_sign(run: Run) -> None:
    for each in run.net.parameters():
        each.sub_(torch.sign(each.grad), alpha=0.01)
        each.grad = None


# Parts of the model are made anew; the optimizer goes on with what it has, as in one process.


def _pruned(run: Run) -> None:
    for block in run.net.blocks:
        prune.l1_unstructured(block.linear, "weight", 0.3)


def _pruned_together(run: Run) -> None:
    chosen = [(block.linear, "weight") for block in run.net.blocks]
    prune.global_unstructured(chosen, pruning_method=prune.L1Unstructured, amount=0.3)


def _plain_again(run: Run) -> None:
    for block in run.net.blocks:
        parametrize.remove_parametrizations(block.linear, "weight")


def _untied(run: Run) -> None:
    run.net.head.weight = nn.Parameter(run.net.head.weight.detach().clone())


def _wider(run: Run) -> None:
    """A head with a class more; its loss does not use it."""
    former, head = run.net.head, nn.Linear(WIDTH, CLASSES + 1)
    nn.init.constant_(head.weight, -9.0)
    nn.init.constant_(head.bias, -9.0)
    head.weight = nn.Parameter(torch.cat([former.weight.detach(), head.weight[CLASSES:].detach()]))
    head.bias = nn.Parameter(torch.cat([former.bias.detach(), head.bias[CLASSES:].detach()]))
    run.net.head = head


def _reordered(run: Run) -> None:
    run.net.blocks = nn.ModuleList(reversed(list(run.net.blocks)))


def _loaded(run: Run) -> None:
    run.net.load_state_dict(run.kept["state"])


def _kept_state(run: Run) -> None:
    run.kept["state"] = {name: each.clone() for name, each in run.net.state_dict().items()}


def _half_back(run: Run) -> None:
    """Goes from where the steps have come to half the way back, as Reptile does."""
    state, before = run.net.state_dict(), run.kept["state"]
    run.net.load_state_dict(
        {
            name: each + (before[name] - each) // 2
            if name.endswith("tracked")
            else each + 0.5 * (before[name] - each)
            for name, each in state.items()
        }
    )
    _kept_state(run)


PARAMETERS = {
    "masked": _after(_each(lambda each: each.mul_(_mask(each)))),
    "masked data": _rewritten(lambda data: data * _mask(data)),
    "rows": _blocks(lambda weight: weight[0].fill_(0.1)),
    "items": _blocks(lambda weight: weight.__setitem__((slice(None), 1), 0.2)),
    "diagonal": _blocks(lambda weight: weight.fill_diagonal_(0.5)),
    "rows normalised": _blocks(lambda weight: weight.div_(weight.norm(dim=1, keepdim=True))),
    "data normalised": _rewritten(lambda data: F.normalize(data, dim=1)),
    "permuted": _blocks(lambda weight: weight.copy_(weight[torch.arange(WIDTH - 1, -1, -1)])),
    "sorted": _rewritten(lambda data: data.sort(1).values),
    "truncated": _blocks(lambda weight: weight.copy_(_of_rank_two(weight))),
    "rounded": _blocks(lambda weight: weight.copy_((weight * 8 / weight.max()).round() / 8)),
    "drawn again": _after(_once(_start)),
    "noise": _after(_noise),
    "decayed, foreach": _after(lambda run: torch._foreach_mul_(list(run.net.parameters()), 0.9)),
    "averaged": _averaged(lambda mean, each: mean.mul_(0.9).add_(each, alpha=0.1)),
    "averaged by data": _averaged(lambda mean, each: mean.data.lerp_(each.data, 0.1)),
    "averages copied": _averaged(lambda mean, each: mean.copy_(0.9 * mean + 0.1 * each)),
    "averaged model": _with_averaged_model(
        lambda run: run.kept["average"].update_parameters(run.net)
    ),
    "looked ahead": _after(_looked_ahead),
    "norm of gradients": _told(lambda run: torch.stack(_norms(run)).norm()),
    "norm by items": _told(_norm_by_item),
    "norm of weights": _told(lambda run: sum(each.square().sum() for each in run.net.parameters())),
    "largest": _told(
        lambda run: torch.stack([each.abs().max() for each in run.net.parameters()]).max()
    ),
    "vector": _told(lambda run: nn.utils.parameters_to_vector(run.net.parameters()).std()),
    "sparsity": _told(_sparsity),
    "clipped": Loop(gradients=lambda run: _clipped(run, torch.stack(_norms(run)).norm())),
    "clipped by items": Loop(gradients=lambda run: _clipped(run, float(_norm_by_item(run)))),
    "gradients decayed": _gradients(lambda each, gradient: gradient.add_(each, alpha=0.01)),
    "gradients masked": _gradients(lambda each, gradient: gradient.mul_(_mask(gradient))),
    "gradients by the largest": _gradients(
        lambda each, gradient: gradient.div_(gradient.abs().max() + 1)
    ),
    "by sign": Loop(clear=lambda run: None, update=torch.no_grad()(_by_sign)),
    "frozen later": Loop(gradients=_counted, after=_once(_frozen)),
    "pruned": Loop(after=_once(_pruned)),
    "pruned together": Loop(after=_once(_pruned_together)),
    "parametrized later": Loop(
        after=_once(lambda run: parametrizations.weight_norm(run.net.blocks[3].linear))
    ),
    "plain again": Loop(
        prepare=lambda net: [parametrizations.weight_norm(block.linear) for block in net.blocks],
        after=_once(_plain_again),
    ),
    "untied": Loop(after=_once(_untied)),
    "wider": Loop(after=_once(_wider)),
    "reordered": Loop(after=_once(_reordered)),
    "statistics set": _after(
        lambda run: (run.net.norm.running_mean.mul_(0.5), run.net.norm.running_var[:2].fill_(2.0))
    ),
    "loaded": Loop(
        begin=lambda run: run.kept.update(state=copy.deepcopy(run.net.state_dict())),
        after=_once(_loaded),
    ),
    "state told": _told(lambda run: sum(each.sum() for each in run.net.state_dict().values())),
    "half the way back": Loop(begin=_kept_state, after=_half_back),
    "state of a part": _after(
        lambda run: run.net.blocks[3].load_state_dict(run.net.blocks[0].state_dict())
    ),
}


def _of_rank_two(weight: torch.Tensor) -> torch.Tensor:
    u, s, v = torch.linalg.svd(weight)
    result: torch.Tensor = u[:, :2] @ torch.diag(s[:2]) @ v[:2]
    return result


def _read_of_all(road: Road) -> Loop:
    """Returns a loop that reads of each block, wherever that is, and looks at the sum."""

    def read(run: Run) -> Any:
        try:
            return sum(road(block.linear.weight) for block in run.net.blocks)
        except RuntimeError as error:
            # Compilers tell it in an error of their own.
            if not any(each in str(error) for each in ("another partition", "sharding group")):
                raise
            raise UnsupportedError(str(error)) from error

    return _told(read)


def _written_to_all(road: Road) -> Loop:
    def write(weight: torch.Tensor) -> None:
        try:
            road(weight)
        except ValueError as error:
            if "read-only" not in str(error):  # NumPy tells it in an error of its own
                raise
            raise UnsupportedError(str(error)) from error

    return _blocks(write)


#: Roads past functions of torch, from parameters of all partitions.
ROADS = {
    **{f"read: {label}": _read_of_all(road) for label, road in READS.items()},
    **{f"written: {label}": _written_to_all(road) for label, road in WRITES.items()},
}
