"""The order of passes where a script has chosen none, on GPUs.

A gradient that waits, and a V, spare GPUs a wait for each other, and cost the host of each some
passes more to start. So they are for models whose steps wait for the GPUs.
"""

from __future__ import annotations

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.planning.choosing import Wish
from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.common.search.devices import (
    REACHED,
    Device,
    device_like,
    device_of,
)

#: What Python takes the host a microbatch for each kernel, about, where captured passes are
#: confirmed: in the modules of its own partition, and between those of all.
_CONFIRMING_SECONDS, _BETWEEN_SECONDS = 20e-6, 8e-6


def usual_order(costs: PassCosts, kernels: int, num_partitions: int, device_name: str) -> Wish:
    """Returns the kind of schedule for a model.

    Args:
        costs: what the passes of a microbatch cost, counted in products in half precision.
        kernels: how many its forward pass launches.
        num_partitions: of the model.
        device_name: the GPU as its driver names it.
    """
    rate = REACHED * _device(device_name).operations["half"]
    on_devices = costs.both / rate / num_partitions
    on_host = kernels * (_CONFIRMING_SECONDS / num_partitions + _BETWEEN_SECONDS)
    return "auto" if on_devices > on_host else "interleaved"


def _device(name: str) -> Device:
    try:
        return device_like(name)
    except ConfigError:  # of whose kind there are no figures
        return device_of("a100")
