"""Tensors that no kernel of PyTorch can read, beyond its public API.

Such a tensor has a shape, a type and a device, and a key by which PyTorch's dispatcher finds a
function of ours before any kernel, whoever calls: Python, TorchScript, a transform of
``torch.func`` or code in C++. It has no memory: PyTorch itself refuses who asks for its address.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

#: PyTorch keeps it for tests: no device and no feature of it has this key.
_KEY = "TESTING_ONLY_GenericWrapper"
_key: Any = torch._C._parse_dispatch_key(_KEY)
_Library: Any = torch.library.Library
#: Gets an operation, and what it was called with by position and by keyword.
Refusal = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


#: In what PyTorch says to code that asks for the memory of a tensor that has none, and to compilers
#: that copy it with its gradient, whose shape it has not.
_IN_MESSAGES = (
    "Cannot access data pointer",
    "access the data pointer",
    "data is not allocated",
    "attempting to assign a gradient of size",
)


def is_about_unreadable(error: RuntimeError) -> bool:
    """Whether an error is PyTorch's own, to code that is given an unreadable tensor."""
    return any(each in str(error) for each in _IN_MESSAGES)


class _Hollow(torch.Tensor):
    """Has a key of the dispatcher that is given to others from it."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Is never asked: the key comes first."""
        raise AssertionError(func)


class Unreadable:
    """Makes tensors unreadable.

    Args:
        refusal: called in the place of an operation that is given such a tensor; its result is
            that of the operation.
    """

    def __init__(self, refusal: Refusal) -> None:
        self._keys = torch._C.DispatchKeySet(_key)
        self._data: dict[tuple[object, ...], torch.Tensor] = {}
        self._refusals = _refusals()
        self._refusals.append(refusal)

    def close(self) -> None:
        """Ends it; no tensor is unreadable any more."""
        self._refusals.pop()

    def data_for(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns data that makes a tensor unreadable when it is assigned to its ``data``.

        Args:
            shape: that the tensor, a dense one, has then.
            dtype: of the tensor.
            device: of the tensor.
        """
        form = shape, dtype, device
        if form not in self._data:
            made = torch.Tensor._make_wrapper_subclass(
                _Hollow, shape, dtype=dtype, device=device, _extra_dispatch_keys=self._keys
            )
            torch._C._set_throw_on_mutable_data_ptr(made)
            self._data[form] = made
        return self._data[form]

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is unreadable now."""
        return torch._C._dispatch_keys(tensor).has(_key)


@functools.cache
def _refusals() -> list[Refusal]:
    """Has the dispatcher call the last one of a list for what has the key; returns the list."""
    found: list[Refusal] = []
    everything = _Library("_", "IMPL")
    everything.fallback(lambda operation, *args, **kwargs: found[-1](operation, args, kwargs), _KEY)
    # Asked when data is assigned, which is how tensors are made unreadable, and readable.
    assigning = _Library("aten", "IMPL")
    assigning.impl("_has_compatible_shallow_copy_type", torch.library.fallthrough_kernel, _KEY)
    _KEPT.extend((everything, assigning))
    return found


#: What is registered lives as long as these.
_KEPT: list[Any] = []
