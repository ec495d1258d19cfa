"""One order of actions for ranks that exchange within modules.

Those of a tensor-parallel group, and those that share sequences: each must run the same actions in
the same order. Microbatches of the former may differ in size, and a schedule follows from what they
cost, which may have been measured, so the schedule of the first rank counts. What they compute must
have one structure: Python that decides by data may go other ways on other ranks, which is an error
here and not a deadlock later.
"""

from __future__ import annotations

import logging
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.planning.schedule import Schedule
from smdistributed.modelparallel.torch.collectives.interface import Collectives
from smdistributed.modelparallel.torch.planning.changed_buffers import buffers_in_turn
from smdistributed.modelparallel.torch.planning.common_schedule import common_schedule, one_by_one
from smdistributed.modelparallel.torch.planning.other_settings import Setting
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.planning.statistics import statistics_in_turn
from smdistributed.modelparallel.torch.record.ir import Node, NodeKind
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.tensor_parallel.module import places_in

logger = logging.getLogger(__name__)

Plans = tuple[Plan, ...]
#: Schedules kept.
_MOST_KEPT = 64


class CommonOrder:
    """The schedules of mini-batches, the same on all ranks that exchange within modules.

    Args:
        runtime: the state of the library in this process.
    """

    def __init__(self, runtime: TorchRuntime) -> None:
        self._runtime = runtime
        self._own: OrderedDict[Plans, tuple[int, Schedule]] = OrderedDict()
        self._heard: OrderedDict[int, Schedule] = OrderedDict()

    def of(self, plans: Plans) -> tuple[int, Schedule | None]:
        """Returns the number of the schedule to run, and with several ranks that schedule.

        Collective: TP_GROUP, CP_GROUP.

        Raises:
            SMPError: the ranks of a group have recorded different structures.
        """
        number, schedule = self._of_slices(plans)
        context = self._runtime.context_group
        if context is None:
            return number, schedule
        return self._of_sequences(plans, context.collectives, schedule)

    def _of_sequences(
        self, plans: Plans, collectives: Collectives, schedule: Schedule | None
    ) -> tuple[int, Schedule]:
        """Returns the schedule of the first of the ranks that share sequences."""
        own = schedule or self._made(plans)[1]
        digests = [zlib.crc32("\n".join(each.graph.lines()).encode()) for each in plans]
        number = zlib.crc32(own.digest().encode())
        everyones = collectives.compare([zlib.crc32(repr(digests).encode()), number])
        if any(each[0] != everyones[0][0] for each in everyones):
            raise SMPError(
                "the ranks that share sequences (CP_GROUP) have recorded different computations: "
                "Python that decides by data, or draws, must decide alike on them, and every rank "
                "must run the same code with the same settings."
            )
        if any(each[1] != number for each in everyones):
            own = self._runtime.communicator.from_first(own, CommGroup.CP_GROUP)
        return everyones[0][1], own

    def _of_slices(self, plans: Plans) -> tuple[int, Schedule | None]:
        """Returns the schedule of the first of a tensor-parallel group, if it has several ranks."""
        group = self._runtime.tensor_group
        if group.size == 1:
            return 0, None
        structure = _structure(plans)
        number = self._made(plans)[0] if group.rank == 0 else 0
        everyones = group.recorded([zlib.crc32(structure.encode()), number])
        if any(each[0] != everyones[0][0] for each in everyones):
            self._refuse(structure)
        number = everyones[0][1]
        known = number in self._heard
        if not all(each[0] for each in group.collectives.compare([int(known)])):
            made = self._made(plans)[1] if group.rank == 0 else None
            communicator = self._runtime.communicator
            self._heard[number] = communicator.from_first(made, CommGroup.TP_GROUP)
        _keep(self._heard)
        self._heard.move_to_end(number)
        return number, self._heard[number]

    def forget(self) -> None:
        """Makes all schedules anew: what they follow from has changed. Every rank must call."""
        self._own.clear()
        self._heard.clear()

    def _made(self, plans: Plans) -> tuple[int, Schedule]:
        if plans not in self._own:
            schedule = schedule_of(self._runtime, plans)
            self._own[plans] = zlib.crc32(schedule.digest().encode()), schedule
            _keep(self._own)
        return self._own[plans]

    def _refuse(self, structure: str) -> None:
        texts = [text.splitlines() for text in self._everyones(structure)]
        for rank, lines in enumerate(texts):
            longest = max(len(lines), len(texts[0]))
            for place in range(longest):
                pair = [
                    each[place] if place < len(each) else "nothing" for each in (texts[0], lines)
                ]
                if pair[0] != pair[1]:
                    raise SMPError(
                        "the ranks of a tensor-parallel group must compute the same modules in "
                        f"the same order; the first difference: tp_rank 0: {pair[0]}; tp_rank "
                        f"{rank}: {pair[1]}. Python that decides by data must decide alike there."
                    )
        raise AssertionError("the structures differ, and their texts do not")

    def _everyones(self, structure: str) -> Sequence[str]:
        return self._runtime.tensor_group.collectives.compare_texts(structure)


def schedule_of(runtime: TorchRuntime, plans: Plans) -> Schedule:
    """Returns the schedule that this rank makes of its plans."""
    config, num_ranks = runtime.config, runtime.topology.pp_size
    reasons = dict.fromkeys(reason for plan in plans for reason in plan.in_turn)
    reasons |= dict.fromkeys(buffers_in_turn(plans))
    if not reasons:
        schedule, makespan, in_seconds, _ = common_schedule(
            plans, num_ranks, runtime.order, config.active_microbatches
        )
        if in_seconds:
            say_prediction(runtime, len(plans), makespan)
        reasons = dict.fromkeys(statistics_in_turn(plans, schedule))
    if reasons:
        schedule = one_by_one(plans, num_ranks)
        if runtime.rank == 0:
            warnings.warn(
                "the microbatches of a step run one after the other, as in one process, and the "
                f"partitions wait for each other: {'; '.join(reasons)}. Without such a module "
                "they overlap.",
                stacklevel=2,
            )
    return schedule


def say_prediction(runtime: TorchRuntime, num_microbatches: int, seconds: float) -> None:
    """Tells the log how long a step is predicted to take."""
    if runtime.rank == 0:
        logger.info(
            "a step of %d microbatches is predicted to take %.1f ms, without its optimizer",
            num_microbatches,
            1e3 * seconds,
        )


def say_settings(settings: Sequence[Setting], bubble_fraction: float) -> None:
    """Tells the log how much of a step ranks wait, and what would make it shorter.

    Args:
        settings: with which it is, the best first.
        bubble_fraction: the share of all ranks' time in which they wait.
    """
    gains = "; ".join(f"{1e3 * each.seconds:.1f} ms with {each.text}" for each in settings)
    logger.info(
        "ranks wait for each other in %.0f%% of a step%s",
        100 * bubble_fraction,
        f", which would take {gains}" if gains else "",
    )


def _structure(plans: Plans) -> str:
    """Returns what ranks must have in common, a line a segment."""
    texts = {plan: _structure_of(plan) for plan in dict.fromkeys(plans)}
    return "\n".join(
        f"microbatch {microbatch}, {line}"
        for microbatch, plan in enumerate(plans)
        for line in texts[plan]
    )


def _structure_of(plan: Plan) -> list[str]:
    lines = []
    for segment in plan.segments:
        names = [
            f"{inside[0]}{_gradients_of(node, plan)}"
            for node in segment.nodes
            if node.kind is NodeKind.LEAF and (inside := places_in(node.target))
        ]
        direction = "differentiated" if segment.index in plan.backward else "forward only"
        lines.append(
            f"segment {segment.index} on partition {segment.rank}, {direction}: "
            f"{', '.join(names) or 'no distributed module'}"
        )
    return lines


def _gradients_of(node: Node, plan: Plan) -> str:
    """Returns which results of a module get gradients: what is in it may have one each."""
    values = plan.differentiated.get(node, ())
    if not values or len(node.outputs) == 1:
        return " (with gradients)" * bool(values)
    places = [str(place) for place, each in enumerate(node.outputs) if each in values]
    return f" (with gradients of results {', '.join(places)})"


def _keep(known: OrderedDict[Any, Any]) -> None:
    while len(known) > _MOST_KEPT:
        known.popitem(last=False)
