"""What a step costs, measured while it runs on fakes."""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.planning.pass_tape import PassTape
from smdistributed.modelparallel.torch.collectives.shapes import is_exchanging
from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    computes_on_fakes,
)
from smdistributed.modelparallel.torch.compat.private.tensors import has_memory
from smdistributed.modelparallel.torch.record.costs.flops import FlopCounter, is_half
from smdistributed.modelparallel.torch.record.costs.lifetimes import Lifetimes
from smdistributed.modelparallel.torch.record.costs.tape_writer import Kept, TapeWriter
from smdistributed.modelparallel.torch.record.costs.work import Operations, Work, makes_tensors
from smdistributed.modelparallel.torch.tensors.nested import map_tensors, tensors_in
from smdistributed.modelparallel.torch.tensors.writes import note_view, note_writes
from smdistributed.modelparallel.torch.tensors.written import written_by

#: Activations meet each other in batched products and in attention.
OF_WEIGHTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.convolution)
#: Whose operations have a tag that says whether they draw random numbers.
_OF_TORCH = frozenset({"aten", "prim", "prims", "profiler"})
#: No schema says that they write: (input, weight, bias, running_mean, running_var, training, ...)
_WRITING_STATISTICS = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
)


@dataclass(frozen=True)
class Draws:
    """The random numbers that the own forward of a module draws, its children left out.

    Attributes:
        most: draws from PyTorch's generators in one call, at most.
        functions: the torch functions that drew.
        in_python: whether it draws from Python's or NumPy's generator.
    """

    most: int = 0
    functions: frozenset[Any] = frozenset()
    in_python: bool = False

    def __bool__(self) -> bool:
        return self.most > 0 or self.in_python

    def union(self, other: Draws) -> Draws:
        """Returns what holds for two calls."""
        return Draws(
            max(self.most, other.most),
            self.functions | other.functions,
            self.in_python or other.in_python,
        )


@dataclass
class ModuleProfile:
    """What one module costs for one microbatch, its children included.

    Attributes:
        order: position of its first call among all modules.
        work: of its forward pass.
        activation_bytes: bytes of all tensors that its forward pass makes; with
            ``trace_memory_usage``, of those that it keeps for its backward pass.
        draws: the random numbers that it draws itself.
        opaque: why its forward can only run for real, so that it cannot be split; else "".
        asks: whether its Python asks about the numbers in inputs of the step.
        repeated: its backward pass computes it again: a checkpointed call has called it.
    """

    order: int
    work: Work = field(default_factory=Work)
    activation_bytes: int = 0
    draws: Draws = Draws()
    opaque: str = ""
    asks: bool = False
    repeated: bool = False


@dataclass
class Profile:
    """Costs of the modules that the step function called; uncalled ones are absent.

    Attributes:
        modules: by module.
        crossing: for the call of each module, by its order, the bytes that would cross a cut
            before it; and for the end.
        step_draws: the random numbers that the step function itself draws, outside all modules.
        reached: the parameters and buffers of others that a module's own code uses, past the tree.
        tape: what passes hold; None where it was not noted.
    """

    modules: dict[nn.Module, ModuleProfile] = field(default_factory=dict)
    crossing: list[int] = field(default_factory=list)
    step_draws: Draws = Draws()
    reached: dict[nn.Module, frozenset[tuple[nn.Module, str]]] = field(default_factory=dict)
    tape: PassTape | None = None


@dataclass(frozen=True)
class Reading:
    """Where a meter stands."""

    flops: int
    weight_flops: int
    moved: int
    kernels: int
    products: int
    half_products: int
    weight_products: int
    moved_bytes: int
    operations: int
    bytes: int
    random_draws: int
    untold: int
    tape: int


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what reaches the dispatcher: operations, bytes, draws, changes of real tensors.

    Args:
        mode: of the fakes; None without any. With it, real tensors are not written to: fakes of
            them are.
        operations: takes note of each operation, to be timed; None where counts are enough.
        not_kept: memory that is there anyhow, where it is noted what passes hold: what autograd
            keeps must be told to ``keep`` then.
        counts_kept: bytes are those of tensors that autograd keeps; else of all that are made.
    """

    def __init__(
        self,
        mode: FakeTensorMode | None = None,
        operations: Operations | None = None,
        *,
        not_kept: Container[int] | None = None,
        counts_kept: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._operations = operations
        self._names: list[str] = []
        self._not_kept = not_kept
        self._counts_kept = counts_kept
        self.tape: TapeWriter | None = None
        self.flops = 0
        #: Those of products of two matrices and of convolutions: of layers with a weight.
        self._weight_flops = 0
        self._moved = 0
        self._kernels = 0
        self._products = self._half_products = self._weight_products = 0
        self._moved_bytes = 0
        self.bytes = 0
        self.random_draws = 0
        #: Operations that do not say whether they draw.
        self.untold = 0
        self.writes = 0
        self.lifetimes = Lifetimes()
        self.begin()
        self._flop_counter = FlopCounter()

    def reading(self) -> Reading:
        """Returns the counts."""
        return Reading(
            self.flops,
            self._weight_flops,
            self._moved,
            self._kernels,
            self._products,
            self._half_products,
            self._weight_products,
            self._moved_bytes,
            len(self._names),
            self.bytes,
            self.random_draws,
            self.untold,
            0 if self.tape is None else self.tape.num_operations,
        )

    def put_back(self, reading: Reading) -> None:
        """Forgets what was counted since a reading."""
        self.flops, self._weight_flops = reading.flops, reading.weight_flops
        self._moved, self._kernels = reading.moved, reading.kernels
        self._products, self._half_products = reading.products, reading.half_products
        self._weight_products, self._moved_bytes = reading.weight_products, reading.moved_bytes
        self.bytes, self.random_draws = reading.bytes, reading.random_draws
        self.untold = reading.untold
        del self._names[reading.operations :]
        if self.tape is not None:
            self.tape.put_back(reading.tape)

    @property
    def work(self) -> Work:
        """All that was done."""
        return self.work_since(Reading(*[0] * len(fields(Reading))))

    def work_since(self, reading: Reading) -> Work:
        """Returns what was done since a reading."""
        return Work(
            self.flops - reading.flops,
            self._weight_flops - reading.weight_flops,
            self._moved - reading.moved,
            self._kernels - reading.kernels,
            self._products - reading.products,
            self._half_products - reading.half_products,
            self._weight_products - reading.weight_products,
            self._moved_bytes - reading.moved_bytes,
            tuple(self._names[reading.operations :]),
            () if self.tape is None else ((reading.tape, self.tape.num_operations),),
        )

    def begin(self) -> None:
        """Starts a microbatch."""
        self.lifetimes.begin()
        if self._not_kept is not None:
            self.tape = TapeWriter(self._not_kept)

    def keep(self, tensor: torch.Tensor) -> Kept | torch.Tensor:
        """Takes note of a tensor that autograd keeps for a backward pass; see ``TapeWriter``."""
        assert self.tape is not None
        before = self.tape.kept_bytes
        kept = self.tape.keep(tensor)
        if self._counts_kept:
            self.bytes += self.tape.kept_bytes - before
        return kept

    def give(self, kept: Kept | torch.Tensor) -> torch.Tensor:
        """Gives autograd what it has kept."""
        assert self.tape is not None
        return self.tape.give(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.tape is not None and self.tape.backward.is_running:
            out = func(*args, **kwargs)
            name = self._name(func, args, kwargs, out)
            self.tape.backward.note(filter(has_memory, tensors_in(out)), name)
            return out
        if func._schema.is_mutable:
            written = written_by(func, args, kwargs)
            note_writes(written)
            if any(not isinstance(each, FakeTensor) for each in written):
                self.writes += 1
                # The mode of fakes computes for real with numbers and real tensors.
                args, kwargs = map_tensors((tuple(args), dict(kwargs)), self._fake)
        out = func(*args, **kwargs)
        if _is_view(func) and not isinstance(args[0], FakeTensor):
            for each in tensors_in(out):
                if isinstance(each, FakeTensor):
                    note_view(each, args[0])
        given, made = tensors_in((tuple(args), kwargs)), tensors_in(out)
        self.lifetimes.note(given, made)
        name = self._name(func, args, kwargs, out)
        if self.tape is not None and (given or made):
            weight_bytes = _weight_bytes(func, args) if func._overloadpacket in OF_WEIGHTS else 0
            with_memory = [*filter(has_memory, made)]
            self.tape.note(filter(has_memory, given), with_memory, weight_bytes, name)
        if is_exchanging():
            return out
        if func in _WRITING_STATISTICS and args[5]:
            note_writes([each for each in args[3:5] if each is not None])
        if torch.Tag.nondeterministic_seeded in func.tags and _may_draw(func, args, kwargs):
            self.random_draws += 1
        self.untold += func.namespace not in _OF_TORCH
        count = self._flop_counter.count(func, args, kwargs, out)
        self.flops += count.flops
        self._moved += count.moved
        self._products += count.products
        self._moved_bytes += count.moved_bytes
        if count.products and is_half(out):
            self._half_products += count.products
        if func._overloadpacket in OF_WEIGHTS:
            self._weight_flops += count.flops
            self._weight_products += count.products
        if makes_tensors(func, out):
            self._kernels += 1
            if name:
                self._names.append(name)
        if not self._counts_kept and isinstance(out, torch.Tensor):
            self.bytes += out.numel() * out.element_size()
        return out

    def _name(self, func: Any, args: Any, kwargs: Any, out: Any) -> str:
        """Returns the name of an operation, if it computes and is to be timed; else ""."""
        if self._operations is None or is_exchanging() or not makes_tensors(func, out):
            return ""
        count = self._flop_counter.count(func, args, kwargs, out)
        return self._operations.name(func, args, kwargs, count.flops, count.products)

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._mode is None or isinstance(tensor, FakeTensor) or not computes_on_fakes():
            return tensor
        fake = self._mode.from_tensor(tensor)
        note_view(fake, tensor)
        return fake


def _weight_bytes(func: Any, args: Sequence[Any]) -> int:
    """Returns the size of what a product is made with, which may be a weight."""
    weight = args[2 if func._overloadpacket is torch.ops.aten.addmm else 1]
    size: int = weight.numel() * weight.element_size()
    return size


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether an operation gives views of its first argument."""
    arguments, returns = func._schema.arguments, func._schema.returns
    return bool(arguments and returns) and all(
        each.alias_info is not None and not each.alias_info.is_write
        for each in (arguments[0], returns[0])
    )


def _may_draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operation that can draw does.

    Attention, and recurrent layers on a GPU, do not if they drop nothing.
    """
    found = _dropout_of(func)
    if found is None:
        return True
    position, name = found
    given = args[position] if position < len(args) else kwargs.get(name, 0.0)
    return bool(given != 0.0)


@functools.cache
def _dropout_of(func: Any) -> tuple[int, str] | None:
    """Returns which argument of an operation is a probability to drop what it computes with."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout", "dropout_p"):
            return position, argument.name
    return None
