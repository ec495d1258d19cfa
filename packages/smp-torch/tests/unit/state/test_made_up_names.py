"""Which code reads by names that it makes up."""

from __future__ import annotations

import operator
from operator import attrgetter
from typing import Any

import pytest

from smdistributed.modelparallel.torch.state.made_up_names import MadeUp, made_up_in

SETTINGS: Any = None
NAME = "scale"

#: By code: what it makes names of up.
CODES: dict[str, tuple[Any, MadeUp]] = {
    "constant": (lambda: getattr(SETTINGS, "scale"), MadeUp()),  # noqa: B009 - what is tried
    "default": (lambda: getattr(SETTINGS, "scale", None), MadeUp()),
    "default that is a name": (lambda: getattr(SETTINGS, "scale", NAME), MadeUp()),
    "nested constants": (lambda: getattr(getattr(SETTINGS, "a", 1), "b", 2), MadeUp()),
    "of a call": (lambda: getattr(len(NAME), "real", 0), MadeUp()),
    "within a call": (lambda: print(getattr(SETTINGS, "scale", 0), "text"), MadeUp()),
    "asked": (lambda: hasattr(SETTINGS, "scale"), MadeUp()),
    "another eval": (lambda: SETTINGS.eval().modules(), MadeUp()),
    "name": (lambda: getattr(SETTINGS, NAME), MadeUp(attributes=True)),
    "name and default": (lambda: getattr(SETTINGS, NAME, 1), MadeUp(attributes=True)),
    "sum": (lambda: getattr(SETTINGS, "sc" + NAME), MadeUp(attributes=True)),
    "text": (lambda: getattr(SETTINGS, f"sc{NAME}", 0), MadeUp(attributes=True)),
    "choice": (lambda: getattr(SETTINGS, NAME if SETTINGS else "a"), MadeUp(attributes=True)),
    "beside a constant": (
        lambda: (getattr(SETTINGS, NAME), max(NAME, "text")),
        MadeUp(attributes=True),
    ),
    "inner name": (lambda: getattr(getattr(SETTINGS, NAME), "b", 1), MadeUp(attributes=True)),
    "given on": (lambda: map(getattr, [SETTINGS], [NAME]), MadeUp(attributes=True)),
    "several": (lambda: getattr(*SETTINGS), MadeUp(attributes=True)),
    "inner code": (lambda: [getattr(SETTINGS, each) for each in NAME], MadeUp(attributes=True)),
    "vars": (lambda: vars(SETTINGS)[NAME], MadeUp(attributes=True)),
    "dict": (lambda: SETTINGS.__dict__[NAME], MadeUp(attributes=True)),
    "attrgetter": (lambda: attrgetter(NAME)(SETTINGS), MadeUp(attributes=True)),
    "operator": (lambda: operator.attrgetter(NAME)(SETTINGS), MadeUp(attributes=True)),
    "globals": (lambda: globals()[NAME], MadeUp(names_globals=True)),
    "eval": (lambda: eval(NAME), MadeUp(attributes=True, names_globals=True)),
}


@pytest.mark.parametrize("name", CODES)
def test_made_up_names_are_found(name: str) -> None:
    function, expected = CODES[name]
    assert made_up_in(function.__code__) == expected
