"""Tensors that no kernel of PyTorch can read, beyond its public API.

Such a tensor has a shape, a type and a device, and a key by which PyTorch's dispatcher finds a
function of ours before any kernel, whoever calls: Python, TorchScript, a transform of ``torch.func``
or code in C++. It has no memory, and whoever asks for its address is refused by PyTorch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: PyTorch keeps it for tests: no device and no feature of it has this key.
_KEY = "TESTING_ONLY_GenericWrapper"
#: Gets an operation, and what it was called with by position and by keyword.
Refusal = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class _Hollow(torch.Tensor):
    """Has a key of the dispatcher that is given to others from it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Is never asked: the key comes first."""
        raise AssertionError(func)


class Unreadable:
    """Makes tensors unreadable; there is one in a process.

    Args:
        refusal: called in the place of an operation that is given such a tensor; its result is
            that of the operation.
    """

    def __init__(self, refusal: Refusal) -> None:
        self._keys = torch._C.DispatchKeySet(torch._C._parse_dispatch_key(_KEY))
        self._everything = torch.library.Library("_", "IMPL")
        self._everything.fallback(lambda op, *args, **kwargs: refusal(op, args, kwargs), _KEY)
        # Asked when data is assigned, which is how tensors are made unreadable, and readable.
        self._assigning = torch.library.Library("aten", "IMPL")
        self._assigning.impl(
            "_has_compatible_shallow_copy_type", torch.library.fallthrough_kernel, _KEY
        )

        self._data: dict[tuple[object, ...], torch.Tensor] = {}

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
            made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                _Hollow, shape, dtype=dtype, device=device, _extra_dispatch_keys=self._keys
            )
            torch._C._set_throw_on_mutable_data_ptr(made)
            self._data[form] = made
        return self._data[form]

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is unreadable now."""
        return torch._C._dispatch_keys(tensor).has(torch._C._parse_dispatch_key(_KEY))
