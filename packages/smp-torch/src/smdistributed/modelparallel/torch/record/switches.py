"""Switches of PyTorch's backends that code may set around calls: which attention, cuDNN or not.

``torch.nn.attention.sdpa_kernel`` and ``torch.backends.cudnn.flags`` do so. A replay sets what the
recorded code had set; what holds around the whole step holds around its replay as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.backends import cuda, cudnn

_Get = Callable[[], bool]
_Put = Callable[[bool], Any]


def _cudnn(name: str) -> tuple[_Get, _Put]:
    return (lambda: getattr(cudnn, name)), (lambda value: setattr(cudnn, name, value))


_SWITCHES: tuple[tuple[_Get, _Put], ...] = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    _cudnn("enabled"),
    _cudnn("benchmark"),
    _cudnn("deterministic"),
)

#: Number of a switch and its position, for those that are not as they were.
Changes = tuple[tuple[int, bool], ...]


def positions() -> tuple[bool, ...]:
    """Returns the positions of all switches."""
    return tuple([get() for get, _ in _SWITCHES])


def changes_since(before: tuple[bool, ...]) -> Changes:
    """Returns which switches have another position now."""
    now = positions()
    if now == before:
        return ()
    return tuple(
        (i, new) for i, (old, new) in enumerate(zip(before, now, strict=True)) if old != new
    )


@contextlib.contextmanager
def switched(changes: Changes) -> Iterator[None]:
    """Sets switches, and puts them back."""
    former = positions()
    try:
        for number, value in changes:
            _SWITCHES[number][1](value)
        yield
    finally:
        for number, _ in changes:
            _SWITCHES[number][1](former[number])
