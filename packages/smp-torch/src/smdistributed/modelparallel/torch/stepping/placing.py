"""Deciding the partition of models, in the first call of a step function that calls them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import PartitionError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.planning.partitioner import Assignment
from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.common.planning.report import partition_text
from smdistributed.modelparallel.torch.model.distributed import DistributedModel, models_of
from smdistributed.modelparallel.torch.model.overlaps import overlaps_in
from smdistributed.modelparallel.torch.planning.compute_costs import ComputeCosts
from smdistributed.modelparallel.torch.planning.placement import Placement, called_in, decide
from smdistributed.modelparallel.torch.planning.shapes import v_gains
from smdistributed.modelparallel.torch.planning.usual_order import usual_order
from smdistributed.modelparallel.torch.record.costs.meter import Profile
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

logger = logging.getLogger(__name__)


def place_models(
    runtime: TorchRuntime, profile: Profile, read: Collection[nn.Module], costs: ComputeCosts
) -> None:
    """Partitions the models that have no partition yet and were used. Collective: WORLD.

    A step function may call a model, or modules in it, or compute with its parameters.

    Args:
        runtime: the state of the library in this process.
        profile: what one microbatch did.
        read: the models whose parameters or buffers it read.
        costs: what work costs.

    Raises:
        PartitionError: the partitions that the user fixed contradict each other.
    """
    reasons = kept_whole(profile)
    for line in reasons:
        logger.info("%s", line)
    for model in models_of(runtime):
        called = not profile.modules.keys().isdisjoint(model.holder.fakes.names)
        if called or model.get_module() in read:
            model.drawing.take(profile)
            if not model.holder.partitioned:
                model.refresh()  # the forward may have replaced modules
                _place(runtime, model, profile, costs)
                idle = idle_partitions(model.placement.assignment)
                if idle and runtime.rank == 0:
                    logger.warning(
                        "partitions %s have no module of the model, and their processes wait for "
                        "the others. %s",
                        idle,
                        " ".join(reasons) or "It has fewer parts than there are partitions.",
                    )


def kept_whole(profile: Profile) -> list[str]:
    """Says which modules cannot be split, and why; modules of one class and reason once."""
    return list(
        dict.fromkeys(
            f"{type(module).__name__} is kept whole: {each.opaque}"
            for module, each in profile.modules.items()
            if each.opaque
        )
    )


def idle_partitions(assignment: Assignment) -> list[int]:
    """Returns the partitions that have no module."""
    return sorted({*range(assignment.num_partitions)} - {*assignment.units.values()})


def _place(
    runtime: TorchRuntime, model: DistributedModel, profile: Profile, costs: ComputeCosts
) -> None:
    config, holder = runtime.config, model.holder
    pinned = runtime.manual_partitions.of(model.get_module())
    if not config.auto_partition:
        pinned.setdefault(model.get_module(), config.default_partition)
    pinned = holder.fixed_partition or pinned
    num_partitions = runtime.topology.pp_size
    outermost = called_in(model.get_module(), profile)
    whole = sum((costs.of(each.work) for each in outermost), PassCosts())
    if runtime.has_open_order:
        counted = sum((ComputeCosts().of(each.work) for each in outermost), PassCosts())
        kernels = sum(each.work.kernels for each in outermost)
        name = torch.cuda.get_device_name(runtime.device)
        runtime.order = usual_order(counted, kernels, num_partitions, name)
    wants_v = runtime.order in ("zero_bubble_v", "auto")

    def decided(*, v_shaped: bool) -> Placement:
        return decide(
            holder.fakes,
            None if config.skip_tracing else profile,
            pinned,
            num_partitions,
            config.memory_weight,
            costs,
            v_shaped=v_shaped,
            num_microbatches=config.microbatches,
        )

    if not wants_v or pinned:
        placement = decided(v_shaped=False)
        if wants_v:
            _say(runtime, "no V-shaped partition is sought: a checkpoint or the user fixed it")
    else:
        placement = _in_v(runtime, whole, decided)
    # One decision for the whole job: code that goes through a set has no order of its own, and
    # hosts may have unlike devices.
    decided_first = placement.assignment, runtime.order
    assignment, runtime.order = runtime.communicator.from_first(decided_first, CommGroup.WORLD)
    runtime.has_open_order = False
    placement = Placement(holder.fakes, assignment)
    for one, other in overlaps_in(model.get_module()):
        places = [placement.partition_of_name(name) for name in (one, other)]
        if places[0] != places[1]:
            raise PartitionError(
                f"{one} and {other} have memory in common and are two objects, as after a.data = "
                f"b.data, and live on partitions {places[0]} and {places[1]}. Let both be one "
                "parameter (module.a = other.b), or put their modules on one partition."
            )
    model.place(placement)
    _say(runtime, partition_text(assignment))


def _in_v(
    runtime: TorchRuntime,
    whole: PassCosts,
    decided: Callable[..., Placement],
) -> Placement:
    """Returns a V if one is possible, and faster or asked for by name, else one piece a rank.

    Args:
        runtime: the state of the library in this process.
        whole: what the passes of the model cost.
        decided: the placement, given its shape.
    """
    config = runtime.config
    try:
        v_shaped = decided(v_shaped=True)
    except PartitionError as error:  # the model has too few parts
        _say(runtime, f"no V-shaped partition: {error}")
        return decided(v_shaped=False)
    if runtime.order == "zero_bubble_v":
        return v_shaped
    flat = decided(v_shaped=False)
    if v_gains(
        flat.assignment,
        v_shaped.assignment,
        config.microbatches,
        config.active_microbatches,
        whole,
    ):
        return v_shaped
    _say(runtime, "no V-shaped partition: a simulation says that it would not be 1% faster")
    return flat


def _say(runtime: TorchRuntime, line: str) -> None:
    if runtime.rank == 0:
        logger.info("%s", line)
