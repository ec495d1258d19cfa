"""Code of arguments makes equal arguments, of the same types."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from smdistributed.modelparallel.torch.execute.expressions import expression


class Made:
    """What a call before has made."""


MADE = Made()


@pytest.mark.parametrize(
    "argument",
    [
        (1, -0.0, 1e-300, True, None, ...),
        [torch.float16, torch.strided, torch.device("cpu"), "it's"],
        {"a": (1,), 2: [], None: {}},
        (slice(None, 3, 2), slice(MADE, None)),
        torch.Size((2, 3)),
        ((torch.Size(()),), MADE),
        math.inf,
        {1, 2},
        object(),
    ],
    ids=repr,
)
def test_arguments_are_made_again(argument: Any) -> None:
    names: dict[str, Any] = {"torch": torch, "made": MADE}

    def constant(obj: Any) -> str:
        names[f"c{len(names)}"] = obj
        return f"c{len(names) - 1}"

    code = expression(argument, lambda obj: "made" if obj is MADE else None, constant)
    found = eval(code, names)
    assert type(found) is type(argument)
    assert repr(found) == repr(argument)


def test_what_says_less_than_it_is_stays_the_object() -> None:
    class Number(float):
        pass

    class Places(tuple):
        pass

    kept: list[Any] = []

    def constant(obj: Any) -> str:
        kept.append(obj)
        return "c"

    given = [Number(1), Places(), math.nan]
    for each in given:
        assert expression(each, lambda obj: None, constant) == "c"
    assert all(one is other for one, other in zip(given, kept, strict=True))
