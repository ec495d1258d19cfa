"""The comparison of signatures finds what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from conformance import signatures


def step(first: Any, second: int = 3, *, third: str = "a") -> None:
    """As printed below."""


@pytest.mark.parametrize(
    ("printed", "difference"),
    [
        ("step(first, second=3, third='a')", "third can be given by its name alone"),
        ("step(first, second=3, *, third='a')", ""),
        ("step(first)", ""),
        ("step(first, second=4)", "second has default 3, not 4"),
        ("step(first, second)", "second has default 3, but none is printed"),
        ("step(second=3)", "first is required but not printed"),
        ("step(second, first)", "second is parameter 1, not 0"),
        ("step(first=1)", "first has no default, not 1"),
        ("step(first, fourth=1)", "fourth is missing"),
        ("step(first, *rest)", "*rest is missing"),
        ("step(first, **rest)", "**rest is missing"),
    ],
)
def test_differences(printed: str, difference: str) -> None:
    found = "; ".join(signatures.differences(step, printed))
    assert difference in found
    assert bool(found) == bool(difference)


def test_a_function_that_takes_everything_has_every_parameter() -> None:
    later: Callable[..., Any] = lambda *args, **kwargs: None  # noqa: E731
    assert not signatures.differences(later, "later(a, b=1)")
