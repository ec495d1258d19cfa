"""The structure of what a module returns: where tensors stand, and which numbers and texts."""

from __future__ import annotations

import enum
from typing import Any

import torch

from smdistributed.modelparallel.common.containers import Container
from smdistributed.modelparallel.torch.tensors.nested import same


class _Mark(enum.Enum):
    """Stands in a structure for what is not compared by its value."""

    TENSOR = "a tensor"
    ANYTHING = "an object"

    def __repr__(self) -> str:
        return self.value


def structure_of(obj: Any) -> Any:
    """Returns the structure of a template, or of plain tuples, lists and dicts."""
    if isinstance(obj, torch.Tensor):
        return _Mark.TENSOR
    if obj is None or (
        isinstance(obj, bool | int | float | complex | str) and not isinstance(obj, enum.Enum)
    ):
        return obj
    if isinstance(obj, Container):
        items = {key: structure_of(item) for key, item in obj.items.items()}
        return Container(obj.skeleton, obj.kind, items)
    if type(obj) in (tuple, list):
        return type(obj)(map(structure_of, obj))
    if type(obj) is dict:
        return {key: structure_of(item) for key, item in obj.items()}
    return _Mark.ANYTHING


def has_structure(structure: Any, obj: Any) -> bool:
    """Whether an object is of a structure."""
    return same(structure, obj, _is_meant)


def _is_meant(want: Any, got: Any) -> bool:
    return want is _Mark.ANYTHING or (want is _Mark.TENSOR and isinstance(got, torch.Tensor))
