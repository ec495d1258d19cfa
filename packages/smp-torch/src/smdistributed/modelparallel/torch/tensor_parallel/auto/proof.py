"""Whether slices of a module compute what the whole module does: tried, with random numbers.

The output of the whole must be the sum of those of the slices, or these side by side. Then autograd
gives the right gradients too: those of weights and inputs are the sums over the ranks.

Weights are random, since those of a model may be zeros that hide a difference. The module that is
tried is a copy, which a template without memory can make at any time.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.tensor_parallel.auto import state_reads
from smdistributed.modelparallel.torch.tensor_parallel.auto.attention import Fill, SplitAttention
from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import (
    Call,
    TensorForm,
    shrunk,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.draws import NotedDraws
from smdistributed.modelparallel.torch.tensor_parallel.auto.maps import (
    is_attention,
    is_map,
    is_transposed,
    sizes_of,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.reads import Reads
from smdistributed.modelparallel.torch.tensor_parallel.auto.split_linear import Gate, SplitLinear
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.module import (
    DistributedModule,
    distributed_modules_in,
    taken,
    without_values,
)

_T = TypeVar("_T")
#: Of differences to the norm of the whole: rounding in single precision stays far below.
_TOLERANCE = 1e-4
#: After so many random numbers those of a large weight repeat: to draw all takes minutes for a
#: large model. A prime, so that neither rows nor columns nor slices are alike.
_PERIOD = 1_000_003
#: An output that every rank has alike.
SAME = "same"
#: An output that is a sum over the ranks.
SUM = "sum"


class RefutedError(Exception):
    """Slices do not compute what the whole does; says why."""


@dataclass(frozen=True)
class Plan:
    """How a module is split.

    Attributes:
        columns: the linear maps in it that are split along their outputs, by name.
        rows: those that are split along their inputs.
        divided: attributes of modules in it that count what is split: name of the module, of the
            attribute; ``config.`` before those of its configuration, of which it gets a copy.
        fused: of columns in which several are one, the name and their sizes.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    divided: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Proof:
    """What was seen when slices gave the result of the whole.

    Attributes:
        outputs: of each tensor of the result: the dim along which ranks have slices, or ``SUM``,
            or ``SAME``.
        draws: of each dropout, the dim along which its input is split; None if it is whole.
        read: the attributes that its modules have read: name of the module, of the attribute. Of
            one in which these are the same, the rest being equal, it is a proof, too.
    """

    outputs: tuple[int | str, ...]
    draws: tuple[int | None, ...]
    read: frozenset[tuple[str, str]]


def cut(module: nn.Module, plan: Plan, size: int, fill: Fill) -> Gate:
    """Puts slices in the places of linear maps; returns what lets them be called.

    Args:
        module: to split, in place.
        plan: how; for an attention of torch, which is split as one, it is empty.
        size: how many ranks there are.
        fill: gives a slice its values, from the name and the whole.
    """
    gate = Gate()
    if is_attention(module):
        assert isinstance(module, nn.MultiheadAttention)
        SplitAttention.make_of(module, gate, fill)
        return gate
    fused = dict(plan.fused)
    for split, names in (("outputs", plan.columns), ("inputs", plan.rows)):
        for name in names:
            owner, _, attribute = name.rpartition(".")
            parent, linear = module.get_submodule(owner), module.get_submodule(name)
            with without_values():
                made = SplitLinear(
                    *sizes_of(linear),
                    linear.bias is not None,
                    split,
                    sections=fused.get(name, ()),
                    is_transposed=is_transposed(linear),
                )
            made.gate = gate
            made.train(linear.training)
            fill(name, linear, made)
            parent._modules[attribute] = made
    for owner, path in plan.divided:
        inner: Any = module.get_submodule(owner)
        config, _, attribute = path.rpartition(".")
        if config:  # others read it too
            setattr(inner, config, copy.copy(getattr(inner, config)))
            inner = getattr(inner, config)
        setattr(inner, attribute, getattr(inner, attribute) // size)
    return gate


class Template:
    """A module without the memory of its weights, to try things with.

    Args:
        module: to copy.
        value_of: gives a buffer its values where they are delayed.

    Attributes:
        linears: the linear maps in it, by name.
        shared: the names of modules in it that others have too.
    """

    def __init__(self, module: nn.Module, value_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.shared: set[str] = set()

        def shape_of(parameter: nn.Parameter) -> torch.Tensor:
            like = torch.empty(parameter.shape, dtype=_wide(parameter.dtype), device="meta")
            return nn.Parameter(like, requires_grad=parameter.requires_grad)

        def kept(buffer: torch.Tensor) -> torch.Tensor:
            values = value_of(buffer).detach()
            return values.to(_wide(buffer.dtype), copy=True).cpu()

        self._module = copied_with(module, shape_of, kept)
        self.linears = {name: each for name, each in self._module.named_modules() if is_map(each)}

    @property
    def module(self) -> nn.Module:
        """The copy, of which the parameters have no values."""
        return self._module

    def sizes(self) -> frozenset[int]:
        """Returns the sizes of its weights, and the whole numbers in its modules."""
        found = {size for each in self._module.parameters() for size in each.shape}
        for each in self._module.modules():
            found.update(value for value in vars(each).values() if type(value) is int)
        return frozenset(found)

    def made(self, draws: torch.Generator) -> nn.Module:
        """Returns a module with random weights."""
        noise = torch.empty(0)

        def values(parameter: nn.Parameter) -> torch.Tensor:
            nonlocal noise
            count = parameter.numel()
            if count <= _PERIOD:
                found = torch.randn(parameter.shape, generator=draws)
            else:
                if noise.numel() < _PERIOD + count:
                    noise = torch.randn(_PERIOD, generator=draws).repeat(2 + count // _PERIOD)
                start = int(torch.randint(_PERIOD, (), generator=draws))
                found = noise[start : start + count].clone().view(parameter.shape)
            if parameter.dim() > 1:
                found /= math.sqrt(parameter.shape[-1])
            return nn.Parameter(found.to(parameter.dtype), requires_grad=parameter.requires_grad)

        return copied_with(self._module, values, torch.clone)


def prove(
    template: Template,
    plan: Plan,
    size: int,
    call: Call,
    forms: Sequence[TensorForm],
    *,
    grad_enabled: bool,
) -> Proof:
    """Proves that slices give the result of the whole, for one form of a call.

    Args:
        template: of the module.
        plan: how it is split.
        size: over how many ranks.
        call: its structure.
        forms: of its tensors.
        grad_enabled: whether it is called with gradients.

    Raises:
        RefutedError: they do not.
    """
    forms = shrunk(forms, template.sizes())

    def proven() -> Proof:
        with torch.set_grad_enabled(grad_enabled):
            return _prove(template, plan, size, call, forms)

    return alone(proven)


def _prove(
    template: Template, plan: Plan, size: int, call: Call, forms: Sequence[TensorForm]
) -> Proof:
    draws = torch.Generator().manual_seed(1)
    whole = template.made(draws)
    arguments = call.sample(forms, draws)
    buffers = _versions(whole)
    given = [version_of(each) for each in Call(arguments).tensors]
    with state_reads.noted(whole) as read:
        expected, drawn = tried(whole, arguments)
    if given != [version_of(each) for each in Call(arguments).tensors]:
        raise RefutedError("it changes its arguments")
    if buffers != _versions(whole):
        raise RefutedError("it changes its buffers")
    results, shapes = [], []
    for rank in range(size):
        part = copied_with(whole, _as_it_is, torch.clone)
        with distributed_modules_in(_Pretended(size, rank)):
            gate = cut(part, plan, size, functools.partial(_slice, rank))
            gate.is_open = True
            with (
                Reads(_owners(part), gate.is_used_by) as reads,
                state_reads.noted(part) as read_of_part,
            ):
                found, dropped = tried(part, arguments)
            read |= read_of_part
            if reads.found:
                raise RefutedError(f"its code reads {reads.found[0]} by itself")
        results.append(found)
        shapes.append(dropped)
    if any(found.structure != expected.structure for found in results):
        raise RefutedError("its slices return something else")
    outputs = tuple(
        _kind([found.tensors[place] for found in results], want)
        for place, want in enumerate(expected.tensors)
    )
    if all(kind == SAME for kind in outputs):
        raise RefutedError("its result does not come from what is split")
    if any(len(each) != len(drawn) for each in shapes):
        raise RefutedError("its slices draw at other places")
    found_draws = [_split_dim(drawn[n], [each[n] for each in shapes]) for n in range(len(drawn))]
    return Proof(outputs, tuple(found_draws), frozenset(read))


def tried(module: nn.Module, arguments: Any) -> tuple[Call, list[tuple[int, ...]]]:
    """Calls a module without dropout; returns its result, and the shapes of what is dropped from.

    Raises:
        RefutedError: the call fails, or draws in another way than by dropout.
    """
    args, kwargs = arguments
    before = torch.get_rng_state()
    noted = NotedDraws()
    try:
        with noted:
            result = Call(module(*args, **kwargs))
    except SMPError as error:
        raise RefutedError(str(error)) from error
    except Exception as error:  # any code may run here
        first = (str(error).splitlines() or [""])[0]
        raise RefutedError(f"{type(error).__name__}: {first}") from error
    if not torch.equal(before, torch.get_rng_state()):
        raise RefutedError("it draws random numbers in another way than by dropout")
    return result, noted.shapes


def alone(function: Callable[[], _T]) -> _T:
    """Runs a function past all modes of torch, which belong to threads; draws nothing."""
    state = torch.get_rng_state()
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function).result()
    finally:
        torch.set_rng_state(state)


class _Pretended(TensorGroup):
    """A group for slices that are tried in one process."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.size, self.rank = size, rank


def _owners(module: nn.Module) -> dict[int, str]:
    """Returns the names of slices, by their ids."""
    return {
        id(parameter): name
        for owner, inner in module.named_modules()
        if isinstance(inner, DistributedModule)
        for name, parameter in inner.named_parameters(owner, recurse=False)
    }


def _versions(module: nn.Module) -> list[int]:
    return [version_of(each) for each in module.buffers()]


def _as_it_is(parameter: nn.Parameter) -> torch.Tensor:
    return parameter


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


def copied_with(
    module: nn.Module,
    of_parameter: Callable[[nn.Parameter], torch.Tensor],
    of_buffer: Callable[[torch.Tensor], torch.Tensor],
) -> nn.Module:
    """Returns a copy of a module with other tensors, and the same configuration."""
    memo: dict[int, Any] = {id(each): of_parameter(each) for each in module.parameters()}
    memo.update((id(each), of_buffer(each)) for each in module.buffers())
    for inner in module.modules():
        for value in vars(inner).values():
            if type(value).__name__.endswith("Config"):
                memo[id(value)] = value
    return copy.deepcopy(module, memo)


def _slice(rank: int, name: str, linear: nn.Module, made: DistributedModule) -> None:
    """Gives a slice its share of the values of the whole."""
    for each, _ in list(made.named_parameters(recurse=False)):
        whole: torch.Tensor = linear.get_parameter(each)
        kept = made.slice_of(each)
        if kept is not None:
            whole = taken(whole, kept.part(made.tensor_group.size, rank))
        made._parameters[each] = nn.Parameter(
            whole.detach(), requires_grad=linear.get_parameter(each).requires_grad
        )


def _kind(parts: list[torch.Tensor], whole: torch.Tensor) -> int | str:
    if not whole.isfinite().all():
        raise RefutedError("it gives no finite numbers on random input")
    if all(part.shape == whole.shape for part in parts):
        if whole.is_floating_point() and _near(sum(parts[1:], parts[0]), whole):
            return SUM
        if all(_near(part, whole) for part in parts):
            return SAME
        raise RefutedError("the sum of what its slices give differs from what it gives whole")
    dim = _split_dim(tuple(whole.shape), [tuple(part.shape) for part in parts])
    assert dim is not None
    if not _near(torch.cat(parts, dim), whole):
        raise RefutedError("what its slices give differs from what it gives whole")
    return dim


def _near(got: torch.Tensor, want: torch.Tensor) -> bool:
    if not want.is_floating_point() and not want.is_complex():
        return torch.equal(got, want)
    difference = float(torch.linalg.vector_norm(got - want))
    return difference <= _TOLERANCE * float(torch.linalg.vector_norm(want))


def _split_dim(whole: tuple[int, ...], parts: list[tuple[int, ...]]) -> int | None:
    """Returns the dim along which equal parts make a whole; None if each is one.

    Raises:
        RefutedError: neither.
    """
    if all(part == whole for part in parts):
        return None
    for dim in range(len(whole)):
        sizes = list(whole)
        sizes[dim] //= len(parts)
        if all(part == tuple(sizes) for part in parts) and sizes[dim] * len(parts) == whole[dim]:
            return dim
    raise RefutedError(f"its slices have shapes {parts}, which do not make {whole}")
