"""What models of Transformers return of modules in them, by hooks that they put on these later.

``output_attentions=True`` is an example. Before version 5 what returned that was their own code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def recorded_in(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules whose results a model, or one in it, returns if it is asked."""
    for owner in model.modules():
        records = getattr(type(owner), "_can_record_outputs", None)
        wanted = tuple(_classes_in(records.values())) if isinstance(records, dict) else ()
        if wanted:
            yield from (each for each in owner.modules() if isinstance(each, wanted))


def _classes_in(values: Any) -> Iterator[type[nn.Module]]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _classes_in(value)
        else:
            kind = getattr(value, "target_class", value)
            if isinstance(kind, type) and kind is not nn.Module:
                yield kind
