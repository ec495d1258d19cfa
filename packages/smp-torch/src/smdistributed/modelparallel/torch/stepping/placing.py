"""Deciding the partition of models, in the first call of a step function that calls them."""

from __future__ import annotations

import logging

from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.planning.report import partition_text
from smdistributed.modelparallel.torch.model.distributed import DistributedModel, models_of
from smdistributed.modelparallel.torch.plan.placement import Placement, decide
from smdistributed.modelparallel.torch.record.costs import Profile
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

logger = logging.getLogger(__name__)


def place_models(runtime: TorchRuntime, costs: Profile) -> None:
    """Partitions the models that have no partition yet and were called. Collective: WORLD.

    Args:
        runtime: the state of the library in this process.
        costs: what one microbatch did.

    Raises:
        PartitionError: the partitions that the user fixed contradict each other.
    """
    for module, each in costs.modules.items():
        if each.opaque:
            logger.info("%s is kept whole: %s", type(module).__name__, each.opaque)
    for model in models_of(runtime):
        if model.get_module() in costs.modules:
            model.drawing.take(costs)
            if not model.partitioned:
                model.refresh()  # the forward may have replaced modules
                _place(runtime, model, costs)


def _place(runtime: TorchRuntime, model: DistributedModel, costs: Profile) -> None:
    config, holder = runtime.config, model.holder
    pinned = runtime.manual_partitions.of(model.get_module())
    if not config.auto_partition:
        pinned.setdefault(model.get_module(), config.default_partition)
    placement = decide(
        holder.fakes,
        None if config.skip_tracing else costs,
        holder.fixed_partition or pinned,
        runtime.topology.pp_size,
        config.memory_weight,
    )
    # One decision for the whole job: code that goes through a set has no order of its own.
    assignment = runtime.communicator.from_first(placement.assignment, CommGroup.WORLD)
    model.place(Placement(holder.fakes, assignment))
    if runtime.rank == 0:
        logger.info("%s", partition_text(assignment))
