"""Modes and transforms of PyTorch, and fakes, beyond its public API."""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _C
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.autograd import forward_ad
from torch.overrides import (
    TorchFunctionMode,
    _pop_mode_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
)
from torch.utils._python_dispatch import (
    _disable_current_modes,
)
from torch.utils.flop_counter import flop_registry as flop_registry

__all__ = [
    "DATA_DEPENDENT",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "flop_registry",
    "pytree",
    "unseen",
]

#: What fakes raise where a result depends on data.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)

_innermost_mode: Callable[[], Any] = torch.overrides._get_current_function_mode

#: Asked at each call of a layer.
_num_function_modes: Callable[[], int] = _C._len_torch_function_stack
_function_mode: Callable[[int], Any] = _C._get_function_stack_at
_num_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
_innermost_transform: Callable[[], Any] = _C._functorch.peek_interpreter_stack
#: A context in which no function mode and no subclass sees functions of torch. It is written in C:
#: where a compiler leaves a frame alone, it would take those of functions that this calls.
unseen: Any = _C.DisableTorchFunction
_tracing_state: Callable[[], Any] = _C._get_tracing_state
#: Whether autocast is on for any type of device.
is_any_autocast: Callable[[], bool] = _C._is_any_autocast_enabled
#: What ``torch.are_deterministic_algorithms_enabled`` asks.
deterministic_algorithms: Callable[[], bool] = _C._get_deterministic_algorithms

#: What ``torch.no_grad`` and the like call.
set_grad_enabled: Callable[..., Any] = torch._C._set_grad_enabled


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keeps torch from logging the failures of operations on fakes, which it raises as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


@contextlib.contextmanager
def past_recording() -> Iterator[None]:
    """Computes for real in the middle of a run on fakes, and records nothing."""
    with unset_fake_temporarily(), torch._C.DisableTorchFunction():
        yield


#: What says of a tensor whose class is no parameter's that it is one.
_OF_SUBCLASSES = frozenset({"_is_param"})


def attributes_of(tensor: torch.Tensor) -> frozenset[str]:
    """Returns the attributes in which PyTorch itself keeps something; fakes have some.

    Args:
        tensor: a fake, or not.
    """
    if not isinstance(tensor, FakeTensor):
        return _OF_SUBCLASSES
    return _attributes_of_fakes(tensor.fake_mode) | _OF_SUBCLASSES


@functools.lru_cache(maxsize=1)  # it keeps the mode alive
def _attributes_of_fakes(mode: FakeTensorMode) -> frozenset[str]:
    with _disable_current_modes(), mode:
        return frozenset(vars(torch.empty(0)))


def computes_on_fakes() -> bool:
    """Whether operations go to a mode of fakes at present."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def past_all_modes() -> contextlib.AbstractContextManager[Any]:
    """Does something that no mode of torch sees; costs next to nothing where there is none."""
    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(_disable_current_modes())
    return stack


def past_transforms() -> contextlib.AbstractContextManager[Any]:
    """Does something that no transform of torch.func sees."""
    context: contextlib.AbstractContextManager[Any] = torch._C._DisableFuncTorch()
    return context


def past_watchers() -> contextlib.AbstractContextManager[Any]:
    """Does something that nobody sees; costs next to nothing where nobody looks."""
    if not is_watched():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(past_all_modes())
    stack.enter_context(past_transforms())
    return stack


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a transform of torch.func has wrapped a tensor, which has no memory of its own."""
    wrapped: bool = _C._functorch.is_functorch_wrapped_tensor(tensor)
    return wrapped


def inside_transform() -> bool:
    """Whether code runs inside a transform of torch.func."""
    return _innermost_transform() is not None


def past_function_modes() -> contextlib.AbstractContextManager[Any]:
    """Does something that no function mode of torch sees."""
    context: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return context


@contextlib.contextmanager
def without_function_modes(kind: type[TorchFunctionMode]) -> Iterator[None]:
    """Leaves the innermost function modes that are of a kind."""
    with contextlib.ExitStack() as stack:
        while torch._C._len_torch_function_stack() and isinstance(_innermost_mode(), kind):
            stack.enter_context(_pop_mode_temporarily())
        yield


@contextlib.contextmanager
def function_modes_left() -> Iterator[None]:
    """Leaves all function modes but the one that knows the default device."""
    with contextlib.ExitStack() as stack:
        while _num_function_modes() and not isinstance(_innermost_mode(), DeviceContext):
            stack.enter_context(_pop_mode_temporarily())
        yield


def function_modes_work() -> bool:
    """Whether function modes are told of functions of torch."""
    return torch._C._is_torch_function_mode_enabled()


def past_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Does something that no dispatch mode of torch sees."""
    return _disable_current_modes()


def past_subclass_functions() -> contextlib.AbstractContextManager[Any]:
    """Inside, functions of torch take subclasses of tensors as they are."""
    return _C.DisableTorchFunctionSubclass()


def is_watched() -> bool:
    """Whether operations go to somebody else before they go to autograd: modes, transforms."""
    return bool(_num_function_modes() or is_watched_below())


def is_watched_by_others() -> bool:
    """The same, but for the mode by which PyTorch keeps the default device."""
    modes = map(_function_mode, range(_num_function_modes()))
    return is_watched_below() or not all(isinstance(each, DeviceContext) for each in modes)


def is_watched_below(num_own: int = 0) -> bool:
    """Whether somebody sees operations who does not see functions of torch.

    Args:
        num_own: how many dispatch modes do not count.
    """
    return bool(
        _num_dispatch_modes() > num_own
        or _innermost_transform() is not None
        or forward_ad._current_level >= 0
        or _tracing_state() is not None
    )


def is_traced() -> bool:
    """Whether ``torch.jit.trace`` runs."""
    return _tracing_state() is not None


def is_of_control_flow(error: BaseException) -> bool:
    """Tells whether torch's own control flow (``torch.cond`` and the like) could not run here."""
    is_told = type(error).__name__ == "UncapturedHigherOrderOpError"
    if is_told or "HigherOrderOperator" in str(error):
        return True
    # Where a mode is, the compiler may fail at that first.
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return type(error).__module__.startswith("torch.") and any(
        frame.f_globals.get("__name__", "").startswith("torch._higher_order_ops")
        for frame in frames
    )


def is_of_fakes(error: BaseException) -> bool:
    """Tells whether code failed on a fake, and might not have on a tensor."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = None if frame is None else frame.tb_frame.f_globals.get("__name__")
    if FakeTensor.__name__ in str(error) or place == FakeTensor.__module__:
        return True
    return isinstance(error, UnsupportedOperatorException) or "no fake impl" in str(error)


def read_backend_switches() -> tuple[bool, ...]:
    """Returns which kinds of attention may be used, cuDNN's flags, and where TF32 may be used.

    ``torch.backends`` reads them by properties and modules that cost microseconds; this runs at
    every call of a recorded step.
    """
    return (
        _C._get_flash_sdp_enabled(),
        _C._get_mem_efficient_sdp_enabled(),
        _C._get_math_sdp_enabled(),
        _C._get_cudnn_sdp_enabled(),
        _C._get_cudnn_enabled(),
        _C._get_cudnn_benchmark(),
        _C._get_cudnn_deterministic(),
        _C._get_cudnn_allow_tf32(),
        _C._get_cublas_allow_tf32(),
    )
