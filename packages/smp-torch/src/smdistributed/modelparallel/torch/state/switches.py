"""Switches of PyTorch that decide what a call computes: grad mode, autocast, backends, types.

Code may set them around calls: ``torch.autocast``, ``torch.nn.attention.sdpa_kernel``,
``torch.backends.cudnn.flags``. A replay sets what the recorded code had set; what the backends have
around the whole step holds around its replay as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.backends import cuda, cudnn

from smdistributed.modelparallel.torch.compat.private.backward import saved_tensors_hooks
from smdistributed.modelparallel.torch.compat.private.modes import read_backend_switches

_Put = Callable[[bool], Any]


def _cudnn(name: str) -> _Put:
    return lambda value: setattr(cudnn, name, value)


def _allow_tf32(value: bool) -> None:
    cuda.matmul.allow_tf32 = value


#: In the order of ``read_backend_switches``.
_PUT: tuple[_Put, ...] = (
    cuda.enable_flash_sdp,
    cuda.enable_mem_efficient_sdp,
    cuda.enable_math_sdp,
    cuda.enable_cudnn_sdp,
    _cudnn("enabled"),
    _cudnn("benchmark"),
    _cudnn("deterministic"),
    _cudnn("allow_tf32"),
    _allow_tf32,
)

#: Number of a switch and its position, for those that are not as they were.
Changes = tuple[tuple[int, bool], ...]
#: Type of device and dtype, for each type of device under autocast.
Autocast = tuple[tuple[str, torch.dtype], ...]


class Settings(NamedTuple):
    """What a call is made under."""

    grad_enabled: bool
    inference: bool
    autocast: Autocast
    switches: Changes
    default_dtype: torch.dtype
    saves_otherwise: bool


class Positions(NamedTuple):
    """What holds around a whole step."""

    switches: tuple[bool, ...]
    saved_tensors_hooks: Any


def positions() -> Positions:
    """Returns what holds now of what a step can change for a part of it."""
    return Positions(read_backend_switches(), saved_tensors_hooks())


def changes_since(before: tuple[bool, ...]) -> Changes:
    """Returns which switches have another position now."""
    now = read_backend_switches()
    if now == before:
        return ()
    return tuple(
        (i, new) for i, (old, new) in enumerate(zip(before, now, strict=True)) if old != new
    )


def autocast_of(devices: tuple[str, ...]) -> Autocast:
    """Returns the autocast of some types of devices."""
    return tuple(
        [
            (device, torch.get_autocast_dtype(device))
            for device in devices
            if torch.is_autocast_enabled(device)
        ]
    )


def settings(devices: tuple[str, ...], before: Positions) -> Settings:
    """Returns what holds now; what can be around a whole step as it differs from ``before``."""
    return Settings(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast_of(devices),
        changes_since(before.switches),
        torch.get_default_dtype(),
        saved_tensors_hooks() != before.saved_tensors_hooks,
    )


@contextlib.contextmanager
def switched(changes: Changes) -> Iterator[None]:
    """Sets switches, and puts them back."""
    former = read_backend_switches()
    try:
        for number, value in changes:
            _PUT[number](value)
        yield
    finally:
        for number, _ in changes:
            _PUT[number](former[number])


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Sets the type of new tensors, and puts it back."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


@contextlib.contextmanager
def without_autocast(devices: tuple[str, ...]) -> Iterator[None]:
    """Switches autocast off: what runs inside says for itself whether it wants it."""
    with contextlib.ExitStack() as stack:
        for device, _ in autocast_of(devices):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
