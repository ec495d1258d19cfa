"""Variables of a model by other numbers: those that Keras gives layers without names.

Keras numbers such layers on in a process (``dense``, ``dense_1``, ...), so that a model built a
second time has other names. The numbers have the same order, though.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection

_NUMBERED = re.compile(r"(.*?)(?:_(\d+))?", re.DOTALL)


def renumbered(
    own: Collection[str], saved: Collection[str], automatic: Collection[str]
) -> dict[str, str]:
    """Returns the names of saved variables by those that they have here, where these differ.

    Nothing, unless the variables are the same but for the numbers of layers without names.

    Args:
        own: names of all variables of models here: of the model in its checkpoint, then a path.
        saved: names of all variables of these models that were saved.
        automatic: what Keras calls layers without names, without numbers.
    """
    if set(own) == set(saved):
        return {}
    here, there = _by_order(own, automatic), _by_order(saved, automatic)
    if here.keys() != there.keys():
        return {}
    return {here[key]: there[key] for key in here}


def _by_order(names: Collection[str], automatic: Collection[str]) -> dict[tuple[str, ...], str]:
    """Returns names by their paths with places among siblings for automatic numbers."""
    siblings: dict[tuple[str, ...], set[str]] = defaultdict(set)
    paths = {name: tuple(name.split("/")) for name in names}
    for path in paths.values():
        for place, part in enumerate(path):
            siblings[path[:place]].add(part)

    def relative(path: tuple[str, ...], place: int) -> str:
        base, number = _split(path[place])
        if place == 0 or base not in automatic:  # the first is what the user calls the model
            return path[place]
        alike = [_split(each) for each in siblings[path[:place]]]
        return f"{base}#{sum(one == base and other < number for one, other in alike)}"

    return {
        tuple(relative(path, place) for place in range(len(path))): name
        for name, path in paths.items()
    }


def _split(part: str) -> tuple[str, int]:
    match = _NUMBERED.fullmatch(part)
    assert match is not None
    return match[1], int(match[2] or 0)
