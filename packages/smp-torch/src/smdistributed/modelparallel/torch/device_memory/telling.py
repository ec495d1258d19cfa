"""When a job tells of its memory: once before it trains, and where it has run out of it."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable
from typing import Any

from smdistributed.modelparallel.torch.device_memory.advice import explanation, is_out_of_memory
from smdistributed.modelparallel.torch.device_memory.measured import report
from smdistributed.modelparallel.torch.device_memory.report import text_of
from smdistributed.modelparallel.torch.model.distributed import models_of
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
    if models_of(runtime) and runtime.live_optimizers():
        try:
            _tell(runtime)
        except Exception:  # whatever a script's own tensors do: it can train without being told
            logger.debug("what training needs is not told", exc_info=True)


def _tell(runtime: TorchRuntime) -> None:
    found = report(runtime)
    needed = found.expected_total
    # The ranks of a host share its memory, and need about as much each.
    sharing = runtime.transport.local_size if runtime.device.type == "cpu" else 1
    if needed * sharing > found.capacity:
        logger.warning(
            "rank %d needs %s on %s before there is any activation, and this has %s%s: %s",
            found.rank,
            text_of(needed),
            found.device,
            text_of(found.capacity),
            f" for {sharing} ranks" if sharing > 1 else "",
            explanation(found, runtime),
        )
    elif runtime.rank == 0:
        logger.info("%s", found)
