"""Offloading of activations in a step function, where the configuration asks for it."""

from __future__ import annotations

from smdistributed.modelparallel.torch.activations.offloading import Offloading
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
