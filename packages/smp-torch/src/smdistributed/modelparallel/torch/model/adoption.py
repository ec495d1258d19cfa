"""Modules that code adds to a model while a step runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from smdistributed.modelparallel.torch.model.distributed import models_of
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime


@contextlib.contextmanager
def modules_adopted(runtime: TorchRuntime) -> Iterator[None]:
    """Tells models of the modules that a forward adds to them."""

    def note(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None and runtime.random.is_active:
            for model in models_of(runtime):
                model.adopt(parent, name, child)

    handle = register_module_module_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()
