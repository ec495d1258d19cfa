"""Seeing what a function mode does not see, while a step is recorded.

Calls of modules are plain Python, and ``autograd.Function.apply`` does not dispatch to overrides;
both are replaced for the time of a recording. Torch's activation checkpointing is too: its function
runs as it is, and the listener learns what belongs together.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.activations.objects import given_objects
from smdistributed.modelparallel.torch.compat.private.backward import hooks_of_nodes_seen
from smdistributed.modelparallel.torch.compat.private.checkpointing import (
    as_reentrant,
    checkpointing_replaced,
    stops_early,
)
from smdistributed.modelparallel.torch.compat.private.compiled import run_eagerly
from smdistributed.modelparallel.torch.compat.private.distributed import collectives_seen
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor, past_recording
from smdistributed.modelparallel.torch.compat.transformers_runs import (
    transformers_as_in_a_real_run,
)
from smdistributed.modelparallel.torch.record.calls.regions import Again
from smdistributed.modelparallel.torch.trial.turns import is_code_of_others, module_of


class Listener(Protocol):
    """Who is told of intercepted calls, and makes them."""

    def call_module(
        self,
        call: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Stands in for ``module(*args, **kwargs)``; ``call`` is the real call."""

    def call_function(
        self, target: Any, name: str, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Stands in for a call that torch's function modes do not see."""

    def checkpointed(
        self, how: Again, objects: Sequence[Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Stands around the call of a function whose activations are not to be kept.

        Args:
            how: it will be computed again.
            objects: with state, that the function is given.
        """

    def note_backward_code(self) -> None:
        """Hears of code of the user's that will run in a backward pass."""

    def note_hook_of_node(self) -> None:
        """Hears of a hook that a node of autograd takes."""

    def note_exchange(self, name: str, group: ProcessGroup | None) -> None:
        """Hears of a call of a function of ``torch.distributed``.

        Args:
            name: of the function.
            group: that exchanges; None for that of all processes.
        """


@contextlib.contextmanager
def intercepted(listener: Listener, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Routes module calls and autograd functions through a listener.

    Args:
        listener: makes the calls.
        modules: those that are recorded; compiled ones run eagerly meanwhile.
    """
    call = nn.Module.__call__
    apply = torch.autograd.Function.__dict__["apply"]

    def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return listener.call_module(call, module, args, kwargs)

    def apply_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
        real = apply.__get__(None, cls)
        return listener.call_function(real, cls.__qualname__, real, args, kwargs)

    convert = nn.Module._apply

    def apply_conversion(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
        tensors = [*module.parameters(recurse), *module.buffers(recurse)]
        if all(function(tensor) is tensor for tensor in tensors):
            return module  # of the wanted type, and on the wanted device, already
        raise UnsupportedError(
            f"a {type(module).__name__} was moved or converted while a step was recorded; do that "
            "before the first call of a step function."
        )

    differentiate = torch.autograd.backward

    def refuse_backward(*args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "with more than one partition, torch.autograd.backward cannot reach the other "
            "partitions: call model.backward(tensor) on the DistributedModel instead."
        )

    torch.autograd.backward = refuse_backward
    nn.Module._apply = apply_conversion  # type: ignore[method-assign]
    nn.Module.__call__ = call_module  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(apply_function)  # type: ignore[assignment,method-assign]
    try:
        # The compiler does not nest in fake tensors, and what it makes shows no calls.
        with (
            run_eagerly(list(modules)),
            transformers_as_in_a_real_run(),
            _checkpoints_seen(listener),
            _saved_tensors_hooks_seen(listener),
            collectives_seen(listener.note_exchange),
            hooks_of_nodes_seen(listener.note_hook_of_node),
            _real_tensors_from_memory(),
        ):
            yield
    finally:
        torch.autograd.backward = differentiate
        nn.Module._apply = convert  # type: ignore[method-assign]
        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


@contextlib.contextmanager
def _checkpoints_seen(listener: Listener) -> Iterator[None]:
    """Runs checkpointed functions once and keeps nothing for a recomputation."""

    def around(*args: Any, **kwargs: Any) -> Iterator[None]:
        how = Again.AS_NEEDED if stops_early(args) else Again.TO_THE_END
        with listener.checkpointed(how, given_objects(args, kwargs)):
            yield

    def reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        objects = given_objects(args, {})
        with as_reentrant(args), listener.checkpointed(Again.REENTRANT, objects):
            return function(*args)

    with checkpointing_replaced(lambda *_: (around, reentrant)):
        yield


@contextlib.contextmanager
def _saved_tensors_hooks_seen(listener: Listener) -> Iterator[None]:
    """Tells of hooks on what autograd keeps: they run in the backward pass."""
    enter = saved_tensors_hooks.__enter__

    def tell_and_enter(self: saved_tensors_hooks) -> None:
        if any(map(is_code_of_others, map(module_of, (self.pack_hook, self.unpack_hook)))):
            listener.note_backward_code()
        enter(self)

    saved_tensors_hooks.__enter__ = tell_and_enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]


@functools.cache  # code that calls them finds the same functions in all microbatches
def _past_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of torch that makes tensors of memory, as it runs past recording modes."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, FakeTensor) for each in args):
            raise UnsupportedError(
                f"torch.{function.__name__} is given a tensor that has no memory yet, in code that "
                "is recorded before values exist. Use the tensor itself, or call it inside one "
                "module that stays whole."
            )
        with past_recording():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _real_tensors_from_memory() -> Iterator[None]:
    """Lets what makes tensors of other libraries' memory make real ones: no mode sees its calls."""
    replaced = {name: getattr(torch, name) for name in ("from_numpy", "frombuffer", "from_dlpack")}
    for name, function in replaced.items():
        setattr(torch, name, _past_modes(function))
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(torch, name, function)
