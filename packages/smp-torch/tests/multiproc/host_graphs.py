"""Graphs of what the dispatcher is told on the host: a stand-in for CUDA graphs without a GPU.

What is captured here is computed at once, and what it wrote to tensors from outside is undone when
the session ends. Doing it again runs the same operations on the same memory.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.compat.private.modes import past_all_modes
from smdistributed.modelparallel.torch.execute import weight_gradients
from smdistributed.modelparallel.torch.stepping import captures

_MEMORY_ALONE = (
    *(torch.ops.aten.empty, torch.ops.aten.empty_like),
    *(torch.ops.aten.empty_strided, torch.ops.aten.new_empty),
)


class HostGraph:
    """Operations, with their arguments and where their results are."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def replay(self) -> None:
        """Computes everything again, into the same memory; no mode sees it."""
        with past_all_modes():
            self._replay()

    def _replay(self) -> None:
        #: Messages under way: ranks that send to each other wait for none before all are given.
        under_way: list[dist.Work] = []
        for function, args, kwargs, result, grad_enabled in self.calls:
            if function.namespace != "c10d":
                _wait(under_way)
            # An operation may change how a tensor looks, not only what is in it.
            args, kwargs = _aliases((args, kwargs))
            with torch.set_grad_enabled(grad_enabled):  # some keep more then
                again = function(*args, **kwargs)
            for each in tree_leaves(again):
                if isinstance(each, torch.ScriptObject):
                    under_way.append(dist.Work.unbox(each))
            for old, new in zip(result, _tensors(again), strict=True):
                if old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old.copy_(new)
        _wait(under_way)


def _wait(under_way: list[dist.Work]) -> None:
    for each in under_way:
        each.wait()
    under_way.clear()


class HostGraphs:
    """See ``execute.graphs.Graphs``."""

    has_room = True

    def __init__(self) -> None:
        self._made: set[int] = set()
        #: By memory that was written to, that and what was in it.
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """See ``Graphs``."""
        self._made.clear()
        self._before.clear()
        try:
            yield
        finally:
            for memory, before in self._before.values():
                memory.copy_(before, False)

    def release(self) -> None:
        """See ``Graphs``."""

    @contextlib.contextmanager
    def capturing(self, generators: Sequence[torch.Generator]) -> Iterator[_Capture]:
        """See ``Graphs``."""
        if generators:
            raise RuntimeError("random numbers of the host are not captured")
        capture = _Capture(self._made, self._before)
        with (
            capture,
            mock.patch.object(torch.Tensor, "numpy", _not_here),
            # On a GPU nobody watches.
            mock.patch.object(weight_gradients, "is_watched", return_value=False),
            _not_compiled(),
        ):
            yield capture


def _not_compiled() -> contextlib.AbstractContextManager[object]:
    """Inside, compiled functions run as they are: the compiler refuses to, where a mode watches."""
    if "torch._dynamo" in sys.modules:
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


def _not_here(tensor: torch.Tensor) -> Any:
    raise TypeError("can't convert a tensor of a device to numpy")


class _Capture(TorchDispatchMode):
    """See ``execute.graphs.Capturing``."""

    def __init__(self, made: set[int], before: dict[int, Any]) -> None:
        super().__init__()
        self.pieces = [HostGraph()]
        self._made = made
        self._before = before

    def cut(self, generators: Sequence[torch.Generator]) -> bool:
        """See ``Capturing``."""
        self.pieces.append(HostGraph())
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:
            raise RuntimeError("operation not permitted: numbers of the host come to the device")
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        if torch.Tag.dynamic_output_shape in func.tags and not _is_gather(func, args):
            raise RuntimeError("operation not permitted: the host waits for a shape")
        if func is torch.ops.aten.set_data.default:
            return func(*args, **kwargs)  # which memory a tensor has is the host's alone
        for tensor in _tensors(list(_written(func, args, kwargs))):
            memory = tensor.untyped_storage()._cdata
            if memory not in self._made:
                whole = tensor.untyped_storage()  # others may see other parts of it
                self._before.setdefault(memory, (whole, whole.clone()))
        before = _aliases((args, kwargs))
        result = func(*args, **kwargs)
        if not func.is_view:
            given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
            memories = {each.untyped_storage()._cdata for each in _tensors(result)}
            self._made |= memories - given
            # No kernel makes memory: on a GPU it stays where it was, with what is in it.
            if func.overloadpacket not in _MEMORY_ALONE:
                call = (func, *before, _aliases(_tensors(result)), torch.is_grad_enabled())
                self.pieces[-1].calls.append(call)
        return result


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Any]:
    """Yields what an operation may write to."""
    if func is torch.ops.aten.native_batch_norm.default:
        yield args[3:5]  # its schema does not say so
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(argument.name)


def _aliases(tree: Any) -> Any:
    """Returns a structure with other tensors, that have the same memory."""
    return tree_map(lambda each: each.detach() if isinstance(each, torch.Tensor) else each, tree)


def _is_gather(func: Any, args: Any) -> bool:
    """Whether what is indexed is so by numbers, which give as many as there are."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(each is None or each.dtype in (torch.int32, torch.int64) for each in args[1])


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def every_step(**options: object) -> None:
    """Has step functions take options that they are not given."""
    names = list(inspect.signature(smp.step).parameters)
    smp.step.__defaults__ = tuple(
        options.get(name, default)
        for name, default in zip(names, smp.step.__defaults__, strict=True)
    )


def capture_every_step() -> None:
    """Has step functions capture their passes in the second call or the third, if possible."""
    every_step(cuda_graphs=True)
    # A step that is not recorded learns in its first call who draws: until then all may.
    captures._FIRST = 1 if smp.pp_size() > 1 else 2
    if not torch.cuda.is_available():
        captures.graphs_of = lambda device, **_: HostGraphs()
