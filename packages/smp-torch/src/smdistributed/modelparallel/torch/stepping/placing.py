"""Deciding the partition of models, in the first call of a step function that calls them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.planning.report import partition_text
from smdistributed.modelparallel.torch.model.distributed import DistributedModel, models_of
from smdistributed.modelparallel.torch.plan.placement import Placement, decide
from smdistributed.modelparallel.torch.record.capture import profile
from smdistributed.modelparallel.torch.record.costs import Profile
from smdistributed.modelparallel.torch.record.decisions import (
    Decisions,
    GivenDecisions,
    OwnDecisions,
)
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.stepping.batch import Call
from smdistributed.modelparallel.torch.stepping.first_rank import Heard, say

logger = logging.getLogger(__name__)


def place_models(
    runtime: TorchRuntime,
    function: Callable[..., Any],
    call: Call,
    recording: Callable[[], contextlib.AbstractContextManager[Any]],
) -> None:
    """Partitions the models that have no partition yet and are called. Collective: PP_GROUP.

    Args:
        runtime: the state of the library in this process.
        function: of the user.
        call: one microbatch.
        recording: a context in which the function may run on fakes.

    Raises:
        PartitionError: the partitions that the user fixed contradict each other.
    """
    models = models_of(runtime)
    if all(model.partitioned for model in models):
        return
    costs = _measure(runtime, models, function, call, recording)
    for module, each in costs.modules.items():
        if each.opaque:
            logger.info("%s is kept whole: %s", type(module).__name__, each.opaque)
    for model in models:
        if model.get_module() in costs.modules:
            model.drawing.take(costs)
            if not model.partitioned:
                _place(runtime, model, costs)


def _measure(
    runtime: TorchRuntime,
    models: Sequence[DistributedModel],
    function: Callable[..., Any],
    call: Call,
    recording: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Profile:
    communicator = runtime.communicator

    def measure(decisions: Decisions) -> Profile:
        with recording():
            return profile(
                [model.holder.fakes for model in models],
                function,
                *call,
                runtime.fake_mode,
                runtime.device,
                decisions,
                runtime.random,
            )

    if runtime.coordinates.pp_rank == 0:
        own = OwnDecisions()
        measured: list[Profile] = []

        def answer() -> Sequence[Any]:
            measured.append(measure(own))
            return own.answers

        say(communicator, answer)
        return measured[0]
    heard = Heard(communicator)
    try:
        return measure(GivenDecisions(heard))
    finally:
        heard()  # also when nobody asked


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
