"""Arguments of steps by the structure that their tensors are in: all kinds, and pairs of kinds.

A script trains a model with an argument of one structure, and returns its tensors in the same. It
is exact where losses, gradients and results are those of one process, also if the other ranks of a
pipeline are given other numbers; refused where an error says what to do.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError

ROWS, WIDTH, MICROBATCHES = 6, 3, 2


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any
    note: str = "kept"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


@dataclasses.dataclass(slots=True)
class Slots:
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSlots:
    x: Any
    y: Any


@dataclasses.dataclass
class Derived(Plain):
    z: Any = None


@dataclasses.dataclass
class LateField:
    x: Any
    y: Any = dataclasses.field(init=False)


@dataclasses.dataclass
class Cached:
    x: Any
    inner: Any

    @functools.cached_property
    def y(self) -> Any:
        return self.inner


class Tagged(list[Any]):
    tag = ""


class Store(MutableMapping[str, Any]):
    """A mapping whose shallow copy has the dict of the original."""

    def __init__(self, **items: Any) -> None:
        self.held = items

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class SharedStore(Store):
    """One whose items are two levels down, where no copy reaches."""

    def __init__(self, **items: Any) -> None:
        super().__init__()
        self.held = types.SimpleNamespace(items=items)  # type: ignore[assignment]

    def __getitem__(self, key: str) -> Any:
        return self.held.items[key]  # type: ignore[index]

    def __setitem__(self, key: str, value: Any) -> None:
        self.held.items[key] = value  # type: ignore[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held.items)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.held.items)  # type: ignore[arg-type]


class Registered:
    def __init__(self, x: Any, y: Any, name: str = "") -> None:
        self.x, self.y, self.name = x, y, name


class Opaque:
    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


class OpaqueSlots:
    __slots__ = ("__x", "y")

    def __init__(self, x: Any, y: Any) -> None:
        self.__x, self.y = x, y

    @property
    def x(self) -> Any:
        return self.__x


class Cutting(Opaque):
    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Cutting:
        return Cutting(_cut(self.x, num_mb, mb), _cut(self.y, num_mb, mb))


def _cut(value: Any, num_mb: int, mb: int) -> Any:
    return value.tensor_split(num_mb)[mb] if isinstance(value, torch.Tensor) else value


def late(x: Any, y: Any) -> LateField:
    made = LateField(x)
    made.y = y
    return made


def added(x: Any, y: Any) -> Plain:
    made = Plain(x, None)
    made.added = y  # type: ignore[attr-defined]
    return made


def cached(x: Any, y: Any) -> Cached:
    made = Cached(x, y)
    assert made.y is y
    return made


def tagged(x: Any, y: Any) -> Tagged:
    made = Tagged([x, y])
    made.tag = "kept"
    return made


def _attributes(value: Any) -> tuple[Any, Any]:
    return value.x, value.y


def _items(value: Any) -> tuple[Any, Any]:
    return value["x"], value["y"]


def _places(value: Any) -> tuple[Any, Any]:
    x, y = value
    return x, y


Make, Read = Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]


def _of(kind: Any) -> Make:
    return lambda x, y: kind({"x": x, "y": y})


#: How a structure is made of two values, and how these are read.
KINDS: dict[str, tuple[Make, Read]] = {
    "list": (lambda x, y: [x, y], _places),
    "tuple": (lambda x, y: (x, y), _places),
    "named tuple": (Pair, _attributes),
    "dict": (_of(dict), _items),
    "ordered dict": (_of(collections.OrderedDict), _items),
    "default dict": (lambda x, y: collections.defaultdict(list, x=x, y=y), _items),
    "user dict": (_of(collections.UserDict), _items),
    "chain map": (_of(collections.ChainMap), _items),
    "mapping proxy": (_of(types.MappingProxyType), _items),
    "store": (lambda x, y: Store(x=x, y=y), _items),
    "shared store": (lambda x, y: SharedStore(x=x, y=y), _items),
    "deque": (lambda x, y: collections.deque([x, y], maxlen=2), _places),
    "user list": (lambda x, y: collections.UserList([x, y]), _places),
    "tagged list": (tagged, _places),
    "data class": (Plain, _attributes),
    "frozen": (Frozen, _attributes),
    "slots": (Slots, _attributes),
    "frozen slots": (lambda x, y: FrozenSlots(x=x, y=y), _attributes),
    "derived": (lambda x, y: Derived(x, None, z=y), lambda value: (value.x, value.z)),
    "late field": (late, _attributes),
    "added attribute": (added, lambda value: (value.x, value.added)),
    "cached property": (cached, _attributes),
    "registered": (Registered, _attributes),
    "slices itself": (Cutting, _attributes),
    "name space": (lambda x, y: argparse.Namespace(x=x, y=y), _attributes),
    "simple name space": (lambda x, y: types.SimpleNamespace(x=x, y=y), _attributes),
    "opaque": (Opaque, _attributes),
    "opaque with slots": (OpaqueSlots, _attributes),
    "view": (lambda x, y: {"x": x, "y": y}.values(), _places),
}
with contextlib.suppress(ImportError):
    import attrs

    Defined = attrs.make_class("Defined", ["x", "y"], slots=True, frozen=True)
    KINDS["attrs"] = (Defined, _attributes)
with contextlib.suppress(ImportError):
    from transformers import BatchEncoding
    from transformers.utils import ModelOutput

    @dataclasses.dataclass
    class Output(ModelOutput):  # type: ignore[misc]
        x: Any = None
        y: Any = None

    KINDS["model output"] = (lambda x, y: Output(x=x, y=y), _attributes)
    KINDS["batch encoding"] = (_of(BatchEncoding), _items)

#: What cannot be taken apart.
OPAQUE = {"name space", "simple name space", "opaque", "opaque with slots", "view"}
#: Nested pairs of kinds, the second around the first and None for alone. What slices itself is
#: written for the tensors that it has, and objects in objects are not looked for.
SCRIPTS = [
    (kind, around)
    for around in (None, *KINDS)
    for kind in KINDS
    if around != "slices itself" and not {kind, around} <= OPAQUE
]


class Script:
    """One of them: makes and reads its argument."""

    def __init__(self, kind: str, around: str | None) -> None:
        self._make, self._read = KINDS[kind]
        self._around = None if around is None else KINDS[around]

    def make(self, x: Any, y: Any) -> Any:
        inner = self._make(x, y)
        return inner if self._around is None else self._around[0](inner, 7)

    def read(self, value: Any) -> tuple[Any, Any]:
        return self._read(value if self._around is None else self._around[1](value)[0])


def run(first: int, stride: int) -> dict[str, int]:
    """Runs scripts; returns how many were exact, and refused.

    Raises:
        AssertionError: one computed other numbers, or changed its argument.
    """
    if Registered not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            Registered,
            lambda value: ([value.x, value.y], value.name),
            lambda children, name: Registered(*children, name),
        )
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, 1)
    loss = (plain(x) - y).square().mean()
    expected = torch.autograd.grad(loss, list(plain.parameters()))
    model = smp.DistributedModel(plain)
    counts = {"exact": 0, "refused": 0}
    for kind, around in SCRIPTS[first::stride]:
        script = Script(kind, around)
        # The words of rank 0 count: the others of a pipeline pass tensors of the same form.
        own = (x, y) if smp.pp_rank() == 0 else (torch.zeros_like(x), torch.zeros_like(y))
        try:
            found = _trained(model, script, script.make(*own), own)
        except SMPError as error:
            if not any(remedy in str(error) for remedy in ("smp_slice", "non_split_inputs")):
                raise
            counts["refused"] += 1
            continue
        torch.testing.assert_close(found, loss.detach(), msg=f"{kind} in {around}")
        for parameter, gradient in zip(
            model.local_parameters(), _own(model, expected), strict=True
        ):
            torch.testing.assert_close(parameter.grad, gradient, msg=f"{kind} in {around}")
        counts["exact"] += 1
    return counts


def _own(model: Any, gradients: Any) -> list[torch.Tensor]:
    here = {id(each) for each in model.local_parameters()}
    parameters = model.get_module().parameters()
    return [each for one, each in zip(parameters, gradients, strict=True) if id(one) in here]


def _trained(model: Any, script: Script, argument: Any, own: Any) -> torch.Tensor:
    """Makes one step; returns its loss."""

    @smp.step
    def step(model: nn.Module, given: Any) -> Any:
        x, y = script.read(given)
        assert len(x) == len(y) == ROWS // MICROBATCHES
        loss = (model(x) - y).square().mean()
        model.backward(loss)  # type: ignore[operator]
        return loss, script.make(x, y)

    model.zero_grad()
    loss, result = step(model, argument)
    for before, after in zip(own, script.read(argument), strict=True):
        assert after is before, "the step changed its argument"
    for value, whole in zip(script.read(result), own, strict=True):
        if isinstance(value, smp.StepOutput) and smp.pp_rank() == 0:
            assert torch.equal(value.concat(), whole)
    mean: torch.Tensor = loss.reduce_mean()
    return mean
