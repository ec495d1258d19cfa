"""Habits of training loops: each is what one process does with the whole batch, or is refused.

A run trains a model on several batches, some with fewer examples than there are microbatches, by a
body, in a loop. Losses over the batch and the parameters in the end must be those of plain PyTorch.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import CommError, SMPError

WIDTH = 4
RATE = 3.0
#: Of losses: gradients in shards are clipped to a norm of 1.
SHARE = 0.02
#: How many examples the batches have, on the first replica and on others; the first batch decides
#: the partition.
EPOCHS: dict[str, tuple[tuple[int, int], ...]] = {
    "whole": ((8, 8), (8, 8), (8, 8)),
    "last": ((8, 8), (2, 2)),
    "single": ((8, 8), (1, 1), (8, 8)),
    "first": ((1, 1), (8, 8)),
    "uneven": ((3, 3), (5, 5), (3, 3)),
    "again": ((2, 2), (2, 2), (2, 2)),
    "differ": ((8, 8), (3, 1), (8, 8)),  # as the last: replicas have as many microbatches again
}


class Examples:
    """Cuts itself, as the lists of a user's library do."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Examples:
        """Returns the part of a microbatch."""
        return Examples(self.numbers.tensor_split(num_mb, axis)[mb])


class Boxes:
    """Has a tensor for each example, as of a detection library."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Boxes:
        """Returns the tensors of a microbatch."""
        numbers = torch.arange(len(self.tensors)).tensor_split(num_mb)[mb]
        return Boxes([self.tensors[each] for each in numbers.tolist()])


class Residual(nn.Module):
    """Adds what it computes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = x + self.map(self.norm(x)).tanh()
        return added


class Heads(nn.Module):
    """Has two results of one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Residual() for _ in range(3)))
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.body(x)
        return self.one(states), self.other(states)


def _losses(model: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    one, other = model(x)
    return SHARE * (one - y).square().mean(), SHARE * other.square().mean()


def trains(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one, other = _losses(model, x, y)
    model.backward(one + other)
    return one + other


def evaluates(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return sum(_losses(model, x, y))  # type: ignore[return-value]


def branches(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Goes another way for a single example."""
    one, other = _losses(model, x, y)
    model.backward(one + other if len(x) > 1 else 2 * one / 2 + other)
    return one


def cut_by_itself(model: Any, x: torch.Tensor, y: Examples) -> torch.Tensor:
    return trains(model, x, y.numbers)


def boxed(model: Any, x: torch.Tensor, y: Boxes) -> torch.Tensor:
    return trains(model, x, torch.stack(y.tensors))


def boxed_twice(model: Any, x: torch.Tensor, y: dict[str, Boxes]) -> torch.Tensor:
    also, boxes = (torch.stack(y[each].tensors) for each in ("also", "boxes"))
    return trains(model, (x + also) / 2, boxes)


def nested(model: Any, x: list[torch.Tensor], y: dict[str, torch.Tensor]) -> torch.Tensor:
    return trains(model, x[0], y["targets"])


def two_losses(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one, other = _losses(model, x, y)
    model.backward(one, retain_graph=True)
    model.backward(other)
    return one


def thrice(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one, other = _losses(model, x, y)
    model.backward(other, retain_graph=True)
    model.backward([one, other], retain_graph=True)
    model.backward(one)
    return other


def losses_at_once(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one, other = _losses(model, x, y)
    model.backward([one, other])
    return one


def _kept(model: Any) -> dict[str, bool]:
    """What plain PyTorch must be told, and a step function need not."""
    return {"retain_graph": True} if isinstance(model, Plain) else {}


def over_one_graph(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one, other = _losses(model, x, y)
    for loss in (one, other, one + other):
        model.backward(loss, **_kept(model))
    return one


def over_two_graphs(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one, _ = _losses(model, x, y)
    model.backward(one)
    again, _ = _losses(model, -x, y)
    model.backward(again / 2, **_kept(model))
    model.backward(again * 3)
    return one


def evaluates_between(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    one, other = _losses(model, x, y)
    model.backward(other, **_kept(model))
    with torch.no_grad():
        _losses(model, x, y)
    model.backward(one)
    return one


SEVERAL = (two_losses, thrice, losses_at_once, over_one_graph, over_two_graphs, evaluates_between)

#: Bodies, and what gives their arguments from a batch.
BODIES: dict[Callable[..., torch.Tensor], Callable[[Any, Any], tuple[Any, Any]]] = {
    trains: lambda x, y: (x, y),
    evaluates: lambda x, y: (x, y),
    branches: lambda x, y: (x, y),
    cut_by_itself: lambda x, y: (x, Examples(y)),
    boxed: lambda x, y: (x, Boxes(y.unbind())),
    boxed_twice: lambda x, y: (
        x,
        {"boxes": Boxes(y.unbind()), "also": Boxes(x.unbind())},
    ),
    nested: lambda x, y: ([x], {"targets": y}),
    **dict.fromkeys(SEVERAL, lambda x, y: (x, y)),
}
#: What a loop does: a step (s), one in ``no_sync`` (n), an evaluation there (e), ``optimizer.step``
#: (u) and ``zero_grad`` (z).
LOOPS = ("nsuz", "nnsuznsuz", "suznsuz", "nuzsuz", "nenesuz", "nzsuz", "nssuz", "snsuznnuzsuz")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"backward_passes_per_step": 2},
    {"overlapping_allreduce": False},
    {"gradient_as_bucket_view": True},
)


class Plain:
    """A model of one process with what scripts use of a DistributedModel."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __call__(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def backward(self, losses: Any, **options: Any) -> None:
        scaled = [losses] if isinstance(losses, torch.Tensor) else losses
        torch.autograd.backward([each / smp.dp_size() for each in scaled], **options)


def _net() -> nn.Module:
    torch.manual_seed(3)
    return Heads()


def _batch(number: int, size: int, replica: int) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(100 * number + replica)
    device = torch.get_default_device()
    return [torch.randn(size, WIDTH, generator=draws).to(device) for _ in range(2)]


def _plainly(body: Any, epoch: Sequence[tuple[int, int]]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the losses of this replica and the parameters in the end."""
    net = _net()
    optimizer, losses = torch.optim.SGD(net.parameters(), RATE), []
    for number, sizes in enumerate(epoch):
        optimizer.zero_grad()
        for replica in range(smp.dp_size()):
            batch = _batch(number, sizes[replica > 0], replica)
            loss = body(Plain(net), *BODIES[body](*batch)).detach()
            if replica == smp.dp_rank():
                losses.append(loss)
        optimizer.step()
    return losses, net.state_dict()


def _split(body: Any, epoch: Sequence[tuple[int, int]], **options: Any) -> Any:
    """Does what ``_plainly`` does, with the library."""
    net = _net()
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(net.get_submodule("one"), True)
    model, step = smp.DistributedModel(net), smp.step(**options)(body)
    optimizer, losses = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), RATE)), []
    for number, sizes in enumerate(epoch):
        optimizer.zero_grad()
        batch = _batch(number, sizes[smp.dp_rank() > 0], smp.dp_rank())
        losses.append(step(model, *BODIES[body](*batch)).reduce_mean())
        if body is not evaluates:
            optimizer.step()
    return losses, model.state_dict()


def _told(body: Any, epoch: Sequence[tuple[int, int]], **options: Any) -> str:
    """Returns what became of a run: exact, refused, or wrong, and why."""
    losses, parameters = _plainly(body, epoch)
    try:
        own, found = _split(body, epoch, **options)
    except CommError as error:
        return f"unclear: {error}"
    except SMPError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"unclear: {type(error).__name__}: {error}"
    pairs = [*zip(losses, own, strict=True), *((parameters[each], found[each]) for each in found)]
    is_exact = all(torch.allclose(got, want, rtol=1e-4, atol=1e-6) for want, got in pairs)
    return "exact" if is_exact and len(found) == len(parameters) else f"wrong: {losses} {own}"


def _looped(loop: str, model: Any, optimizer: Any, step: Any, withheld: Any) -> Any:
    """Runs a loop; returns the last loss."""
    loss = None
    for number, each in enumerate(loop):
        if each == "u":
            optimizer.step()
        elif each == "z":
            model.zero_grad()
        else:
            with withheld() if each in "ne" else contextlib.nullcontext():
                loss = step(number, evaluates if each == "e" else trains)
    return loss


def _told_of_loop(loop: str, **options: Any) -> str:
    plain, net = _net(), _net()

    def plainly(number: int, body: Any) -> Any:
        results = [body(Plain(plain), *_batch(number, 8, each)) for each in range(smp.dp_size())]
        return results[smp.dp_rank()].detach()

    optimizer: Any = torch.optim.SGD(plain.parameters(), RATE)
    want = _looped(loop, plain, optimizer, plainly, contextlib.nullcontext)
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(net.get_submodule("one"), True)
    model = smp.DistributedModel(net, **options)
    steps = {body: smp.step(body) for body in (trains, evaluates)}

    def step(number: int, body: Any) -> Any:
        return steps[body](model, *_batch(number, 8, smp.dp_rank())).reduce_mean()

    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), RATE))
    pairs = [(want, _looped(loop, model, optimizer, step, model.no_sync))]
    found, parameters = model.state_dict(), plain.state_dict()
    pairs += [(parameters[each], found[each]) for each in parameters]
    is_exact = all(torch.allclose(got, want, rtol=1e-4, atol=1e-6) for want, got in pairs)
    return "exact" if is_exact else "wrong"


def withheld(first: int = 0, stride: int = 1) -> dict[str, Any]:
    """Returns what became of loops with ``no_sync``."""
    kinds = [*itertools.product(LOOPS, range(len(OPTIONS)))][first::stride]
    return _counted({(loop, way): _told_of_loop(loop, **OPTIONS[way]) for loop, way in kinds})


def small_batches(first: int = 0, stride: int = 1, names: Sequence[str] = ()) -> dict[str, Any]:
    """Returns what became of batches of all sizes, in bodies of these names."""
    names = names or [body.__name__ for body in BODIES if body not in SEVERAL]
    bodies = [body for body in BODIES if body.__name__ in names]
    kinds = [*itertools.product(EPOCHS, bodies, ({}, {"static": True}))]
    # Ranks that compute together refuse to have different numbers, and no step can follow.
    together = smp.tp_size() > 1 or smp.state.cfg.sharded_data_parallel_degree > 1
    kinds = [each for each in kinds if not (together and each[0] == "differ")][first::stride]
    return _counted(
        {
            (epoch, body.__name__, *options): _told(body, EPOCHS[epoch], **options)
            for epoch, body, options in kinds
        }
    )


def several_passes(epochs: Sequence[str] = ("whole", "last")) -> dict[str, Any]:
    """Returns what became of steps with several backward passes."""
    return _counted(
        {
            (epoch, body.__name__): _told(body, EPOCHS[epoch])
            for epoch, body in itertools.product(epochs, SEVERAL)
        }
    )


def withheld_gradients_are_own() -> None:
    """In ``no_sync`` each replica has what it has computed, and afterwards the mean of all."""
    plain, net = _net(), _net()
    model, step = smp.DistributedModel(net), smp.step(trains)
    sums = []
    for replica in range(smp.dp_size()):
        plain.zero_grad()
        trains(Plain(plain), *_batch(0, 8, replica))
        sums.append(plain.other.bias.grad * smp.dp_size())
    with model.no_sync():
        with model.no_sync():
            pass
        step(model, *_batch(0, 8, smp.dp_rank()))
        torch.testing.assert_close(net.other.bias.grad, sums[smp.dp_rank()])
        with pytest.raises(SMPError, match="put it around the call"):
            smp.step(lambda x: model.no_sync())(torch.ones(8))
    step(model, *_batch(0, 8, smp.dp_rank()))
    if model.data_parallel.updates()[net.other.bias]:  # an owner has the mean alone
        torch.testing.assert_close(net.other.bias.grad, 2 * sum(sums) / smp.dp_size())


def masked(model: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return trains(model, mask @ x, x)


def in_another_order(model: Any, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return trains(model, x[order], x)


def told_of_misfits() -> list[str]:
    """Returns what is told of arguments that have the length of the batch and are none."""
    x = _batch(0, 8, 0)[0]
    arguments = {masked: torch.ones(8, 8).tril(), in_another_order: torch.arange(8).flip(0)}
    told = []
    # The second is found where it is computed, which ends a job of several partitions.
    for body in [masked] if smp.pp_size() > 1 else arguments:
        try:
            smp.step(body)(smp.DistributedModel(_net()), x, arguments[body])
        except Exception as error:
            told.append("\n".join((str(error), *getattr(error, "__notes__", ()))))
    return told


def different_numbers() -> str:
    """Returns what became of replicas with different numbers of microbatches."""
    return _told(trains, EPOCHS["differ"])


def _counted(ends: dict[Any, str]) -> dict[str, Any]:
    """Returns how many runs ended how, and what was told of those that are not exact."""
    return {
        "counts": Counter(each.partition(":")[0] for each in ends.values()),
        "told": {name: each for name, each in ends.items() if each != "exact"},
    }
