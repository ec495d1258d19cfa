"""Offloading of activations in a step function, where the configuration asks for it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from smdistributed.modelparallel.torch.activations.checkpointing import is_marked
from smdistributed.modelparallel.torch.activations.offloading import Offloading
from smdistributed.modelparallel.torch.compat.private.compiled import written
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime


def offloading_of(runtime: TorchRuntime, name: str) -> Offloading | None:
    """Returns what moves the activations of a step function; None if they stay.

    Args:
        runtime: the state of the library in this process.
        name: of the step function, for messages.
    """
    config = runtime.config
    if not config.offload_activations:
        return None
    return Offloading(config.activation_loading_horizon, runtime.device, name)


def compiled_with_checkpointing(models: Iterable[DistributedModel]) -> list[nn.Module]:
    """Returns the modules of models that are compiled together with their checkpointing."""
    return [
        module for model in models for module in model.compiled.roots if is_marked(written(module))
    ]
