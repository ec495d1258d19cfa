"""Parameters that take no memory until their rank is known: ``smp.delay_param_initialization``.

Inside the context, large tensors on the host are made on torch's meta device, and every operation
that writes to one is written down, with the state of the random generator before it. A random
operation also runs once on a temporary, so that the generator moves on as it would have. A rank
later replays the operations that lead to its own tensors, one tensor at a time, and gets the values
of an immediate construction to the last bit.

A tensor is known by its storage: views and parameters made from one need no record of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import (
    TorchDispatchMode,
    past_dispatch_modes,
    past_function_modes,
    pytree,
)
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.tensors.written import written_by

#: Tensors up to this many elements are made at once: constructors read values from small ones.
_SMALL = 1024


@dataclass(eq=False)
class _Storage:
    """The memory that a delayed tensor will have.

    Attributes:
        meta: a tensor that keeps the stand-in alive, and with it its identity.
        writes: the operations that made or changed it, in order.
    """

    meta: torch.Tensor
    writes: list[_Write] = field(default_factory=list)


@dataclass(frozen=True)
class _View:
    """A tensor in a delayed storage."""

    storage: _Storage
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, memory: torch.UntypedStorage) -> torch.Tensor:
        # Where the memory is, whatever the script's default device is.
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class _Kept:
    """A real tensor that an operation reads."""

    tensor: torch.Tensor
    version: int


@dataclass(frozen=True)
class _Write:
    """One operation.

    Attributes:
        index: position among all operations.
        function: the operation.
        args, kwargs: its arguments, with views and kept tensors in place of tensors.
        outputs: for each tensor of its result, the storage that it makes, or None.
        generator: whose numbers it draws, if it does.
        state: of the generator before it.
    """

    index: int
    function: Any
    args: Any
    kwargs: Any
    outputs: list[_Storage | None]
    generator: torch.Generator | None
    state: torch.Tensor | None

    @property
    def reads(self) -> list[_Storage]:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf.storage for leaf in leaves if isinstance(leaf, _View)]


class DelayedParameters:
    """The delayed tensors of this process.

    Args:
        draw: random numbers are drawn, so that a generator moves on; False where no tensor will
            ever have values.
    """

    def __init__(self, *, draw: bool = True) -> None:
        self.draw = draw
        self._storages: dict[int, _Storage] = {}
        #: Tensor objects that were changed in place, and their versions when the context was left.
        self._changed: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self._num_writes = 0
        self._is_open = False

    @contextlib.contextmanager
    def delaying(self, *, only: bool = True) -> Iterator[None]:
        """Delays the tensors that are made inside.

        Args:
            only: False does nothing.
        """
        if self._is_open or not only:
            yield
            return
        self._is_open = True
        try:
            with _AsOnHost(self), _Delaying(self):
                yield
        finally:
            self._is_open = False
            self._versions = {key: tensor._version for key, tensor in self._changed.items()}

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has no values yet."""
        return tensor.is_meta and storage_of(tensor) in self._storages

    def fill(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Gives a delayed tensor its values, on a device; it stays the same Python object.

        Raises:
            UnsupportedError: something was written to it after the context was left.
        """
        self._check_unchanged(tensor)
        self.become(tensor, self.compute(tensor).to(device))

    def _check_unchanged(self, tensor: torch.Tensor) -> None:
        is_as_left = tensor._version == self._versions.get(id(tensor), 0)
        if not (is_as_left or self._shares_count_as_left(tensor)):
            raise UnsupportedError(
                f"a parameter of shape {tuple(tensor.shape)} was changed after "
                "smp.delay_param_initialization was left and before it had values: initialise it "
                "inside, or load states with DistributedModel.load_state_dict."
            )

    def _shares_count_as_left(self, tensor: torch.Tensor) -> bool:
        """Whether writes are counted with those to a tensor that is as it was left.

        So it is with a parameter of a tensor that was written to before.
        """
        memory = storage_of(tensor)
        for key, other in self._changed.items():
            if storage_of(other) != memory or other._version != self._versions[key]:
                continue
            before = tensor._version
            torch.autograd.graph.increment_version(other)
            self._versions[key] += 1
            if tensor._version != before:
                return True
        return False

    def cast(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        """Has delayed tensors get their values in another type; they stay the same objects.

        Raises:
            UnsupportedError: something was written to one after the context was left.
        """
        for tensor in tensors:
            self._check_unchanged(tensor)
        if not tensors:
            return
        with self.delaying():
            cast = [tensor.detach().to(dtype) for tensor in tensors]
        for tensor, other in zip(tensors, cast, strict=True):
            self.become(tensor, other)

    def drop(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Makes a delayed tensor an empty one: its values belong on another rank."""
        self.become(tensor, torch.empty(0, dtype=tensor.dtype, device=device))

    def become(self, tensor: torch.Tensor, real: torch.Tensor) -> None:
        """Turns a tensor into another one, which keeps its identity and attributes."""
        self._changed.pop(id(tensor), None)
        self._versions.pop(id(tensor), None)
        other = real.detach()
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other)
            other.__class__ = type(tensor)
        other.requires_grad_(tensor.requires_grad)
        other.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, other)  # type: ignore[no-untyped-call]

    def origin(self, tensor: torch.Tensor) -> bytes:
        """Returns from which states of generators the values of a delayed tensor come."""
        writes = _leading_to(self.view(tensor).storage, self._num_writes)
        states = [write.state for write in writes if write.state is not None]
        return b"".join(state.numpy().tobytes() for state in states)

    def compute(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the values of a delayed tensor at this point."""
        view = self.view(tensor)
        memory: dict[_Storage, torch.UntypedStorage] = {}
        with torch.no_grad(), past_dispatch_modes():
            for write in _leading_to(view.storage, self._num_writes):
                _replay(write, memory)
            return view.of(memory[view.storage])

    # ------------------------------------------------------------------ for the mode

    def view(self, tensor: torch.Tensor) -> _View:
        """Returns where a delayed tensor lies."""
        return _View(
            self._storages[storage_of(tensor)],
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def note(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        generator: torch.Generator | None,
        state: torch.Tensor | None,
    ) -> None:
        """Writes an operation down."""
        written = written_by(function, args, kwargs)
        changed = [self.view(tensor).storage for tensor in written]
        # A view, whose writes count as those of its base, would keep that from changing identity.
        bases = [each._base if each._base is not None else each for each in written]
        self._changed.update((id(each), each) for each in bases)
        outputs: list[_Storage | None] = []
        for tensor in _tensors(result):
            key = storage_of(tensor)
            outputs.append(None if key in self._storages else _Storage(tensor))
            self._storages.setdefault(key, outputs[-1])  # type: ignore[arg-type]
        made = [storage for storage in outputs if storage is not None]
        if not made and not changed:
            return  # a view
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._template, (args, kwargs))
        write = _Write(self._num_writes, function, args, kwargs, outputs, generator, state)
        self._num_writes += 1
        for storage in dict.fromkeys([*changed, *made]):
            storage.writes.append(write)

    def _template(self, tensor: torch.Tensor) -> _View | _Kept:
        if self.holds(tensor):
            return self.view(tensor)
        if tensor.is_meta:
            raise UnsupportedError(
                "a delayed parameter was assigned a number through an index of tensors "
                "(parameter[indices] = 0); use index_fill_ or masked_fill_."
            )
        if tensor.numel() <= _SMALL:
            tensor = tensor.clone()
        return _Kept(tensor, tensor._version)


class _AsOnHost(TorchFunctionMode):
    """Says that delayed tensors are on the host: torch's initialisers leave meta tensors alone."""

    def __init__(self, delayed: DelayedParameters) -> None:
        super().__init__()
        self._answers = {
            torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
            torch.Tensor.device.__get__: torch.device("cpu"),
        }
        self._delayed = delayed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._answers and self._delayed.holds(args[0]):
            return self._answers[func]
        return func(*args, **(kwargs or {}))


class _Delaying(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of the constructors."""

    def __init__(self, delayed: DelayedParameters) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._delayed = delayed
        # One for all: freed blocks between which small ones were made would not be used again.
        self._scratch = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with past_function_modes():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        holds = self._delayed.holds
        tensors = _tensors((args, kwargs))
        if not any(map(holds, tensors)):
            if tensors or not _makes_on_host(func, kwargs):
                return func(*args, **kwargs)
            return self._create(func, args, kwargs)
        written = written_by(func, args, kwargs)
        if all(map(holds, written)):
            try:
                result = func(*_on_meta(args), **_on_meta(kwargs))
            except (RuntimeError, NotImplementedError):
                # A question about values, or an operation without shapes: it needs the values.
                if written:
                    raise
            else:
                generator, state = self._draw(func, args, kwargs, written)
                self._delayed.note(func, args, kwargs, result, generator, state)
                return result
        return func(*self._real(args), **self._real(kwargs))

    def _create(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **{**kwargs, "device": "meta"})
        if all(tensor.numel() <= _SMALL for tensor in _tensors(result)):
            return func(*args, **kwargs)
        generator, state = self._draw(func, args, kwargs, [])
        self._delayed.note(func, args, kwargs, result, generator, state)
        return result

    def _draw(
        self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]
    ) -> tuple[torch.Generator | None, torch.Tensor | None]:
        """Lets a random operation move its generator; returns that and its state before."""
        if torch.Tag.nondeterministic_seeded not in func.tags or not self._delayed.draw:
            return None, None
        generator = kwargs.get("generator") or torch.default_generator
        state = generator.get_state()
        targets = {id(tensor) for tensor in written}

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in targets:
                view = self._delayed.view(tensor)
                if self._scratch.nbytes() < tensor.untyped_storage().nbytes():
                    self._scratch = torch.UntypedStorage(tensor.untyped_storage().nbytes())  # type: ignore[no-untyped-call]
                return view.of(self._scratch)
            return self._delayed.compute(tensor) if self._delayed.holds(tensor) else tensor

        args, kwargs = pytree.tree_map_only(torch.Tensor, real, (args, kwargs))
        func(*args, **kwargs)
        return generator, state

    def _real(self, structure: Any) -> Any:
        delayed = self._delayed
        return pytree.tree_map_only(
            torch.Tensor,
            lambda tensor: delayed.compute(tensor) if delayed.holds(tensor) else tensor,
            structure,
        )


def _tensors(structure: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def _makes_on_host(function: Any, kwargs: Any) -> bool:
    """Whether a function without tensor arguments makes a tensor on the host."""
    names = {argument.name for argument in function._schema.arguments}
    return "device" in names and torch.device(kwargs.get("device") or "cpu").type == "cpu"


def _on_meta(structure: Any) -> Any:
    return pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor if tensor.is_meta else torch.empty_like(tensor, device="meta"),
        structure,
    )


def _leading_to(storage: _Storage, end: int) -> list[_Write]:
    """Returns the operations that decide what a storage holds before operation ``end``."""
    found: dict[int, _Write] = {}
    pending = [(storage, end)]
    while pending:
        storage, end = pending.pop()
        for write in storage.writes:
            if write.index < end and write.index not in found:
                found[write.index] = write
                pending += [(read, write.index) for read in write.reads]
    return [found[index] for index in sorted(found)]


def _replay(write: _Write, memory: dict[_Storage, torch.UntypedStorage]) -> None:
    def real(leaf: Any) -> Any:
        if isinstance(leaf, _View):
            return leaf.of(memory[leaf.storage])
        if isinstance(leaf, _Kept):
            if leaf.tensor._version != leaf.version:
                raise UnsupportedError(
                    f"a tensor of shape {tuple(leaf.tensor.shape)} from which a delayed parameter "
                    "was made has been changed since; make the parameter from a copy of it."
                )
            return leaf.tensor
        return leaf

    args, kwargs = pytree.tree_map(real, (write.args, write.kwargs))
    if write.generator is None:
        result = write.function(*args, **kwargs)
    else:
        assert write.state is not None
        former = write.generator.get_state()
        write.generator.set_state(write.state)
        try:
            result = write.function(*args, **kwargs)
        finally:
            write.generator.set_state(former)
    for storage, tensor in zip(write.outputs, _tensors(result), strict=True):
        if storage is not None:
            assert tensor.stride() == storage.meta.stride()
            memory[storage] = tensor.untyped_storage()
