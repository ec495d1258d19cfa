"""Eager tensors some of which have no buffer, so that NumPy asks these for their numbers.

NumPy takes the memory of what has a buffer, past all of Python. Without one it asks ``__array__``.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tensorflow.python.framework import ops

from smdistributed.modelparallel.tensorflow.compat.replaced import Replacement, replaced

#: Where CPython has, in a type, what makes buffers: behind the head of the object 17 words.
_PLACE = (3 + 17) * ctypes.sizeof(ctypes.c_void_p)
_Getter = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)


@contextlib.contextmanager
def buffers_refused(has_none: Callable[[Any], bool]) -> Iterator[None]:
    """Within, some eager tensors have no buffer.

    Args:
        has_none: tells whether a tensor has none.
    """
    slots = ctypes.c_void_p.from_address(id(ops.EagerTensor) + _PLACE).value
    slot = ctypes.c_void_p.from_address(slots or 0)
    original = _Getter(slot.value or 0)

    def get(tensor: Any, view: int, flags: int) -> int:
        try:
            return -1 if has_none(tensor) else int(original(tensor, view, flags))
        except Exception:  # such as of a tensor that was not computed
            return -1

    getter = _Getter(get)
    saved, slot.value = slot.value, ctypes.cast(getter, ctypes.c_void_p).value
    try:
        with replaced([Replacement(ops._EagerTensorBase, "__array__", lambda _: _array)]):
            yield
    finally:
        slot.value = saved


def _array(self: Any, dtype: Any = None, copy: Any = None) -> Any:
    """Returns the numbers of a tensor as NumPy asks for them; its memory is only read."""
    found = np.asarray(self._numpy())
    if copy or (dtype is not None and found.dtype != dtype):
        return np.array(found, dtype=dtype)
    found = found.view()
    found.flags.writeable = False
    return found
