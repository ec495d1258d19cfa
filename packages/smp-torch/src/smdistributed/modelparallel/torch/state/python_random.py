"""The random generators of Python and NumPy: whether something drew from them."""

from __future__ import annotations

import contextlib
import ctypes
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

#: Where in an object its own data begins, after its count of references and its class.
_HEAD_BYTES = object.__basicsize__
#: What a Mersenne twister is: 624 numbers, and the place of the next one.
_TWISTER, _TWISTER_BYTES = "MT19937", 625 * 4


def python_draws() -> Callable[[], bool]:
    """Returns a function that says whether Python's or NumPy's generator was drawn from since.

    A recording asks at each call of a module, so generators are looked at where they are in memory:
    to have their states made as objects takes fifty times as long.
    """
    before = _in_memory()
    return lambda: _in_memory()[: len(before)] != before


@contextlib.contextmanager
def python_random_kept() -> Iterator[None]:
    """Puts the generators back at the end."""
    before = [(state(), put_back) for state, put_back in _generators()]
    try:
        yield
    finally:
        for state, put_back in before:
            put_back(state)


def _generators() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    found: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (random.getstate, random.setstate)
    ]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found.append((numpy.random.get_state, numpy.random.set_state))
    return found


def _in_memory() -> list[object]:
    """Returns what is another if a generator has moved.

    That is also so if it gave the second of two normal numbers, which it has kept beside its state.
    """
    python: Any = random.getstate.__self__  # type: ignore[attr-defined]
    found: list[object] = [_own_data(python, random.Random.__base__), python.gauss_next]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        bits = numpy.random.get_bit_generator()
        is_twister = type(bits).__name__ == _TWISTER
        found += [
            _own_data(numpy.random.get_state.__self__, numpy.random.RandomState),
            ctypes.string_at(bits.ctypes.state_address, _TWISTER_BYTES)
            if is_twister
            else repr(bits.state),
        ]
    return found


def _own_data(obj: object, kind: Any) -> bytes:
    """Returns the memory of an object of a class that is written in C."""
    return ctypes.string_at(id(obj) + _HEAD_BYTES, kind.__basicsize__ - _HEAD_BYTES)
