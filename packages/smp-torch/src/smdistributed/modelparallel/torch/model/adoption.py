"""Modules and parameters that code adds to a model while a step runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from smdistributed.modelparallel.torch.model.distributed import models_of
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime


@contextlib.contextmanager
def additions_adopted(runtime: TorchRuntime) -> Iterator[None]:
    """Tells models of the modules and parameters that a forward adds to them."""

    def note(parent: nn.Module, name: str, added: nn.Module | nn.Parameter | None) -> None:
        if added is not None and runtime.random.is_active:
            for model in models_of(runtime):
                model.adopt(parent, name, added)

    with contextlib.ExitStack() as stack:
        for register in (
            register_module_module_registration_hook,
            register_module_parameter_registration_hook,
        ):
            stack.callback(register(note).remove)
        yield
