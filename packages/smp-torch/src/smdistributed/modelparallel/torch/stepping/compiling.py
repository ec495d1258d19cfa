"""``torch.compile`` of what the library distributes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.stepping.function import NOT_COMPILED, StepFunction


@contextlib.contextmanager
def compiled_inside() -> Iterator[None]:
    """Has ``torch.compile`` compile what a distributed model distributes, and return the model.

    What it would make of it else compiles the code that distributes. A step function is returned
    as it is.
    """
    compile_anything = torch.compile

    def compile(model: Any = None, **options: Any) -> Any:
        if isinstance(model, DistributedModel):
            model.compile(**options)
            return model
        if isinstance(model, StepFunction):
            warnings.warn(NOT_COMPILED.format(model.name), stacklevel=2)
            return model
        return compile_anything(model, **options)

    torch.compile = compile
    try:
        yield
    finally:
        torch.compile = compile_anything
