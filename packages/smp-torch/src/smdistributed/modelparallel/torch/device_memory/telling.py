"""When a job tells of its memory: once before it trains, and where it has run out of it."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from smdistributed.modelparallel.common.search.rank_memory import RankMemory
from smdistributed.modelparallel.torch.device_memory.advice import explanation, is_out_of_memory
from smdistributed.modelparallel.torch.device_memory.forecast import by_rank
from smdistributed.modelparallel.torch.device_memory.kinds import ACTIVATIONS
from smdistributed.modelparallel.torch.device_memory.measured import report
from smdistributed.modelparallel.torch.device_memory.report import MemoryReport, text_of
from smdistributed.modelparallel.torch.model.distributed import models_of
from smdistributed.modelparallel.torch.planning.passes_held import PassesHeld
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

logger = logging.getLogger(__name__)


def explained_when_out(runtime: TorchRuntime) -> Callable[[BaseException], str]:
    """Returns what says of an error that a device has no memory left where all of it is."""

    def remark(error: BaseException) -> str:
        if not is_out_of_memory(error):
            return ""
        with contextlib.suppress(Exception):  # there may be no memory left to look at it
            return explanation(report(runtime), runtime)
        return ""

    return remark


def tell_before_training(runtime: TorchRuntime) -> None:
    """Tells what training will need of this rank's memory, once models have their places. Local.

    What passes hold is told when a step has been recorded, before the first of them runs.

    Args:
        runtime: the state of the library in this process, whose models and optimizers have been
            made.
    """
    waiting = [model for model in models_of(runtime) if not model.partitioned]
    if waiting:
        this = weakref.ref(runtime)

        def placed(*_: Any) -> None:
            if (found := this()) is not None:
                tell_before_training(found)

        waiting[-1].register_post_partition_hook(placed)
        return
    if not (runtime.passes.listeners or runtime.passes.ranks):
        that = weakref.ref(runtime)

        def recorded() -> None:
            if (found := that()) is not None:
                _tell_of_passes(found)

        runtime.passes.listeners.append(recorded)
    if models_of(runtime) and runtime.live_optimizers():
        try:
            _tell(runtime)
        except Exception:  # whatever a script's own tensors do: it can train without being told
            logger.debug("what training needs is not told", exc_info=True)


def _tell(runtime: TorchRuntime) -> None:
    found = report(runtime)
    # In a pipeline more is told when a step is recorded.
    if not _warned(found, runtime) and runtime.rank == 0 and runtime.topology.pp_size == 1:
        logger.info("%s", found)


def _tell_of_passes(runtime: TorchRuntime) -> None:
    """Tells what training takes, now that a step has been recorded."""
    try:
        _warned(report(runtime), runtime)
        if runtime.rank == 0:
            logger.info("%s", line_of(by_rank(runtime), runtime.passes.ranks))
    except Exception:
        logger.debug("what training needs is not told", exc_info=True)


def _warned(found: MemoryReport, runtime: TorchRuntime) -> bool:
    """Warns if a device has less memory than training needs; returns whether it has."""
    needed = found.expected_total
    # The ranks of a host share its memory, and need about as much each.
    sharing = runtime.transport.local_size if runtime.device.type == "cpu" else 1
    if needed * sharing <= found.capacity:
        return False
    logger.warning(
        "rank %d needs %s on %s%s, and this has %s%s: %s",
        found.rank,
        text_of(needed),
        found.device,
        "" if ACTIVATIONS in found.expected else " before there is any activation",
        text_of(found.capacity),
        f" for {sharing} ranks" if sharing > 1 else "",
        explanation(found, runtime),
    )
    return True


def line_of(ranks: Sequence[RankMemory], held: Sequence[PassesHeld]) -> str:
    """Returns what the fullest rank of a pipeline takes, and all together, as a line of text.

    Args:
        ranks: what each takes.
        held: what passes hold on each.
    """
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].total)
    most, passes = ranks[fullest], held[fullest]
    where = f"partition {fullest} takes most, " if len(ranks) > 1 else ""
    everything = f"; all {len(ranks)} partitions take " if len(ranks) > 1 else ""
    return (
        f"memory in training: {where}{text_of(most.total)}: parameters {text_of(most.parameters)}, "
        f"gradients {text_of(most.gradients)}, optimizer {text_of(most.optimizer)}, activations "
        f"{text_of(most.activations)} ({text_of(passes.a_microbatch)} of each of at most "
        f"{passes.in_flight} microbatches in flight, and what passes make), messages and inputs "
        f"{text_of(most.transfers)}{everything}"
        + (text_of(sum(each.total for each in ranks)) if everything else "")
    )
