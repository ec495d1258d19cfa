"""Code that reads the weights of split modules gives what one process gives, or is refused.

A population of kinds of reads, places where code runs, and moments: each case trains for a step
beside plain PyTorch. All ranks have the same examples, so plain PyTorch has them once.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ended_jobs import check_job
from kernel_roads import ROADS
from tensor_cases import SIZES, WIDTH, alone, compare_gradients, slice_itself
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.tensor_parallel.exchange import whole

MICROBATCHES = 2
#: What reads a linear map, or what looks like one, as a number or a scalar.
Read = Callable[[Any], Any]


class Squared(torch.autograd.Function):
    """A function of a user's own, which no function of torch is told of."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return weight.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


#: Reads that slices would answer otherwise than the whole does.
READS: dict[str, Read] = {
    "norm": lambda linear: linear.weight.norm(),
    "sum": lambda linear: linear.weight.sum(),
    "of squares": lambda linear: linear.weight.pow(2).sum(),
    "shape": lambda linear: linear.weight.shape[1] ** -0.5,
    "size": lambda linear: linear.weight.size(-1) / 100,
    "numel": lambda linear: linear.weight.numel() / 2000,
    "T": lambda linear: linear.weight.T.mean(),
    "linear": lambda linear: F.linear(torch.ones(1, WIDTH), linear.weight).mean(),
    "matmul": lambda linear: (torch.ones(WIDTH) @ linear.weight).mean(),
    "index": lambda linear: linear.weight[0].sum(),
    "detach": lambda linear: linear.weight.detach().mean(),
    "data": lambda linear: linear.weight.data.mean(),
    "len": lambda linear: len(linear.weight) / 100,
    "rows": lambda linear: sum(row.abs().sum() for row in linear.weight),
    "stacked": lambda linear: torch.stack([linear.weight, linear.weight]).std(),
    "by name": lambda linear: torch.linalg.vector_norm(x=linear.weight),
    "function": lambda linear: Squared.apply(linear.weight),
    "item": lambda linear: linear.weight.max().item(),
    "list": lambda linear: sum(linear.weight.tolist()[0]),
    "copy": lambda linear: copy.deepcopy(linear.weight).sum(),
    "compared": lambda linear: (linear.weight > 0).sum() / 1000,
    "like": lambda linear: torch.ones_like(linear.weight).sum() / 2000,
}


def typed(linear: Any) -> float:
    # As T5 of Transformers asks.
    is_same = isinstance(linear.weight, torch.Tensor) and torch.float32 == linear.weight.dtype
    return 0.5 if is_same else 0.25


#: Those that slice and whole answer alike.
HARMLESS: dict[str, Read] = {
    "bias": lambda linear: 0.0 if linear.bias is None else linear.bias.norm(),
    "dtype": typed,
    "device": lambda linear: torch.ones(1, device=linear.weight.device).sum(),
    "requires_grad": lambda linear: float(linear.weight.requires_grad),
    "is_floating_point": lambda linear: float(linear.weight.is_floating_point()),
    "floating": lambda linear: float(torch.is_floating_point(linear.weight)),
    "parameter": lambda linear: float(isinstance(linear.weight, nn.Parameter)),
    "none": lambda linear: float(linear.weight is None),
    "dim": lambda linear: linear.weight.dim() / 10,
    "in_features": lambda linear: linear.in_features / 100,
    "out_features": lambda linear: linear.out_features / 100,
}
KINDS = {**READS, **HARMLESS}


def nothing(linear: Any) -> float:
    return 0.0


class Inner(nn.Module):
    """Has the map that is read; it may read it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        self.read: Read = nothing

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.map(states).tanh() + self.read(self.map)


class Beside(nn.Module):
    """Reads the map of another module."""

    def __init__(self, others: nn.Module) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))
        self.others = (others,)
        self.read: Read = nothing

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.factor * states + self.read(self.others[0].map)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.beside = Beside(self.inner)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.is_checkpointed = False

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.is_checkpointed:
            states = checkpoint(self.inner, states, use_reentrant=False)
        else:
            states = self.inner(states)
        return self.last(self.beside(states))


def in_hook(net: Any, read: Read) -> Any:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + read(module)

    return net.inner.map.register_forward_hook(hook)


class Given:
    """Undoes that a module reads."""

    def __init__(self, module: Any, read: Read) -> None:
        self._module = module
        module.read = read

    def remove(self) -> None:
        self._module.read = nothing


#: Where a forward reads.
FORWARDS: dict[str, Callable[[Any, Read], Any]] = {
    "parent": lambda net, read: Given(net.inner, read),
    "sibling": lambda net, read: Given(net.beside, read),
    "hook": in_hook,
}


def like_map(weight: torch.Tensor) -> Any:
    return types.SimpleNamespace(weight=weight, bias=None, in_features=WIDTH, out_features=WIDTH)


def summed(read: Read, tensors: Any) -> Any:
    return sum(read(like_map(each)) for each in tensors if each.dim() == 2)


#: How the body of a step reaches what it reads.
BODIES: dict[str, Callable[[Any, Any, Read], Any]] = {
    "module": lambda model, stored, read: read(model_of(model).inner.map),
    "parameters": lambda model, stored, read: summed(read, model.parameters()),
    "named_parameters": lambda model, stored, read: summed(
        read, [each for _, each in model.named_parameters()]
    ),
    "stored": lambda model, stored, read: summed(read, stored),
}


def model_of(model: Any) -> Any:
    return model.get_module() if isinstance(model, smp.DistributedModel) else model


class Body:
    """The body of a step; what it reads is set for each case."""

    def __init__(self, stored: list[nn.Parameter]) -> None:
        self.stored = stored
        self.before: Any = None
        self.after: Any = None

    def __call__(self, model: Any, states: torch.Tensor, backward: Any) -> Any:
        loss = model(states).square().mean()
        if self.before is not None:
            loss = loss + self.before(model, self.stored)
        backward(loss)
        after = 0.0 if self.after is None else self.after(model, self.stored)
        return loss.detach(), torch.as_tensor(after).detach().float()


class NoReferenceError(Exception):
    """Plain PyTorch itself cannot do what a case does."""


class Pair:
    """A split model and plain PyTorch beside it."""

    def __init__(self, build: Callable[[], nn.Module], **options: Any) -> None:
        torch.manual_seed(3)
        with smp.tensor_parallelism(**options):
            module = build()
        self.model = smp.DistributedModel(module)
        torch.manual_seed(3)
        with alone():
            self.plain = build()
        self.states = torch.randn(4, WIDTH)
        self._bodies = [Body(list(each.parameters())) for each in (self.model, self.plain)]
        body = self._bodies[0]

        @smp.step
        def train(model: Any, states: torch.Tensor) -> Any:
            return body(model, states, model.backward)

        self._train = train

    def given(self, moment: str, read: Callable[[Any, Any], Any] | None) -> None:
        """Has the bodies read at a moment."""
        for body in self._bodies:
            setattr(body, moment, read)

    def expected(self) -> list[tuple[float, float]]:
        """Returns the losses of plain PyTorch, and what it reads later."""
        self.plain.zero_grad()
        found = []
        for part in self.states.chunk(MICROBATCHES):
            loss, more = self._bodies[1](
                self.plain, part, lambda loss: (loss / MICROBATCHES).backward()
            )
            found.append((float(loss), float(more)))
        return found

    def _by_plain(self, function: Callable[[], Any]) -> Any:
        with alone():
            try:
                return function()
            except RuntimeError as error:
                raise NoReferenceError from error

    def train(self) -> Any:
        """Runs a step of the split model; returns what its body does."""
        self.model.zero_grad()
        return self._train(self.model, self.states)

    def compare(self) -> None:
        """Compares a step of both.

        Raises:
            UnsupportedError: the step is refused.
        """
        wanted = self._by_plain(self.expected)
        losses, more = self.train()
        got = list(zip(map(float, losses.outputs), map(float, more.outputs), strict=True))
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted))
        compare_gradients(self.model, self.plain)

    def evaluate(self) -> None:
        """Compares an evaluation outside of steps."""
        with torch.no_grad():
            wanted = self._by_plain(lambda: self.plain(self.states))
            torch.testing.assert_close(self.model(self.states), wanted)


def outcome(function: Callable[[], None]) -> str:
    """Returns what became of a case."""
    try:
        function()
    except UnsupportedError as error:
        rule = r"was given [\w.]+weight .* each tensor-parallel rank has a slice .* Keep its module"
        return "refused" if re.search(rule, str(error)) else "refused for another reason"
    except AssertionError:
        return "wrong"
    except NoReferenceError:
        return "not in PyTorch"
    except TypeError as error:
        if "can't convert cuda" not in str(error):  # what NumPy cannot have in any case
            raise
        return "not in PyTorch"
    except (RuntimeError, ValueError) as error:  # of shapes that do not fit, say
        return type(error).__name__
    return "exact"


def tried_in_forward(pair: Pair, read: Read, place: str, moment: str) -> None:
    nets = [model_of(pair.model), pair.plain]
    handles = [FORWARDS[place](net, read) for net in nets]
    for net in nets:
        net.is_checkpointed = moment == "recomputed"
    try:
        if moment == "an evaluation":
            pair.evaluate()
        else:
            pair.compare()
    finally:
        for each in handles:
            each.remove()


def tried_in_body(pair: Pair, read: Read, place: str, moment: str) -> None:
    pair.given(moment, lambda model, stored: BODIES[place](model, stored, read))
    try:
        pair.compare()
    finally:
        pair.given(moment, None)


def on_a_road(name: str) -> Read:
    def read(linear: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ROADS[name](linear.weight)

    return read


#: Reads by roads that no function of torch is told of.
BY_ROADS: dict[str, Read] = {name: on_a_road(name) for name in ROADS}


def cases(kinds: dict[str, Read]) -> Iterator[tuple[str, Callable[[Pair], None]]]:
    """Yields kinds of reads, and what tries them in one place and at one moment."""
    moments = ["a step", "recomputed"]
    if smp.pp_size() == 1:
        moments.append("an evaluation")
    for places, tried, whens in (
        (FORWARDS, tried_in_forward, moments),
        (BODIES, tried_in_body, ["before", "after"]),
    ):
        for kind, place, when in itertools.product(kinds, places, whens):
            if kind == "bias" and place == "sibling" and smp.pp_size() > 1:
                continue  # of a module on another partition, as any parameter of it
            yield kind, functools.partial(tried, read=kinds[kind], place=place, moment=when)


def population(
    first: int = 0, stride: int = 1, *, by_roads: bool = False
) -> dict[tuple[str, str], int]:
    """Tries cases; returns how often harmless reads and others came to which end.

    Args:
        first: of those to try.
        stride: from one to the next.
        by_roads: those that no function of torch is told of.
    """
    pair = Pair(Net)
    found: Counter[tuple[str, str]] = Counter()
    kinds = BY_ROADS if by_roads else KINDS
    for number, (kind, tried) in list(enumerate(cases(kinds)))[first::stride]:
        if smp.pp_size() > 1:  # what a module does that stays whole is recorded once
            pair = Pair(Net)
        end = outcome(functools.partial(tried, pair))
        found["harmless" if kind in HARMLESS else "others", end] += 1
        if end not in ("exact", "refused", "not in PyTorch"):
            print(f"{kind} {tried.keywords}: {end}")
        check_job(number, found)
    pair.compare()  # nothing is left behind
    return dict(found)


class Group(nn.Module):
    """A closed group, which ``auto`` splits as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(states)))


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.embedding((states > 0).long()[:, 0])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = smp.nn.DistributedTransformerLayer(**SIZES)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        sequences = states[:, None] * torch.linspace(-1, 2, 3)[:, None]
        return self.block((sequences, None))[0] * torch.linspace(-1, 2, WIDTH)


class Head(smp.nn.DistributedModule):
    """A user's own, which uses the slices of another module."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(states, whole(self.tensor_group, self.weight))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = smp.nn.DistributedEmbedding(5, WIDTH)
        self.head = Head(self.embedding)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.head(states + self.embedding((states > 0).long()[:, 0]))


#: Other modules that have slices, and with which options they are made.
OTHERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "group": (Group, {"auto": True}),
    "embedding": (Looked, {"distribute_embedding": True}),
    "layer": (Block, {}),
    "tied": (Tied, {}),
}


def other_modules(name: str) -> dict[tuple[str, str], int]:
    """Reads the parameters of other modules in the bodies of steps; returns what came of it."""
    build, options = OTHERS[name]
    pair = Pair(build, **options)
    assert any(True for _ in pair.model.split_parameters())
    found: Counter[tuple[str, str]] = Counter()
    for kind, place, moment in itertools.product(
        ("norm", "shape", "dtype", "dim"), ("parameters", "stored"), ("before", "after")
    ):
        end = outcome(functools.partial(tried_in_body, pair, KINDS[kind], place, moment))
        found["harmless" if kind in HARMLESS else "others", end] += 1
    return dict(found)


def shapes_by_scripts() -> list[str]:
    """Has TorchScript ask for the shape of a weight that partitions share; returns what came."""
    ends = []
    for kind, tried, place, when in (
        ("script shape", tried_in_body, "stored", "after"),
        ("script shape", tried_in_forward, "sibling", "a step"),
        ("script numel", tried_in_forward, "sibling", "recomputed"),
    ):
        pair = Pair(Net)
        ends.append(outcome(functools.partial(tried, pair, BY_ROADS[kind], place, when)))
    return ends


def compiled(place: str) -> dict[tuple[str, str], int]:
    """Reads in modules that are compiled in place; returns what came of it."""
    found: Counter[tuple[str, str]] = Counter()
    for kind in ("norm", "shape", "dtype", "none"):
        pair = Pair(Net)
        pair.model.get_module().compile(backend="eager")
        read = KINDS[kind]
        end = outcome(functools.partial(tried_in_forward, pair, read, place, "a step"))
        found["harmless" if kind in HARMLESS else "others", end] += 1
    return dict(found)


def between_steps() -> None:
    """Between steps parameters are whole, for all but this library: optimizers have slices."""
    pair = Pair(Net)
    pair.compare()
    weight = pair.model.get_module().inner.map.weight
    assert isinstance(weight, nn.Parameter)
    assert weight.shape == (WIDTH, WIDTH)
    assert slice_itself(weight).shape == (WIDTH, WIDTH // smp.tp_size())
    assert isinstance(copy.deepcopy(weight), nn.Parameter)
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=0.1, foreach=True)
        for each in (pair.model, pair.plain)
    ]
    smp.DistributedOptimizer(optimizers[0]).step()
    assert optimizers[0].state[weight]["exp_avg"].shape == slice_itself(weight).shape
    optimizers[1].step()
    pair.compare()
    read = READS["norm"]
    assert outcome(lambda: tried_in_body(pair, read, "module", "after")) == "refused"
    assert isinstance(weight, nn.Parameter)
    slice_itself(weight).norm()  # after an error, too

    @smp.step
    def train(model: Any, states: torch.Tensor) -> torch.Tensor:
        model.zero_grad()  # clears what nobody reads
        loss = model(states).square().mean()
        model.backward(loss)
        return loss

    train(pair.model, pair.states)


def kept_between_steps() -> None:
    """Of what was made of a slice between steps a step is told the shape alone."""
    pair = Pair(Net)
    weight = pair.model.get_module().inner.map.weight
    shapes: list[tuple[int, ...]] = []

    def look(kept: torch.Tensor, model: Any, stored: Any) -> Any:
        shapes.append(tuple(kept.shape))
        return kept.norm()

    for kept in (weight.detach(), weight.data):
        pair.given("before", functools.partial(look, kept))
        with pytest.raises(UnsupportedError, match=r"norm asks for inner\.map\.weight, of which"):
            pair.train()
    pair.given("before", None)
    assert (WIDTH, WIDTH) in shapes
    pair.compare()
