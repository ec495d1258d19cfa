"""What a step costs whose job is being planned: of its graph, which is made and never run."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.search.profile import ModelProfile, Precision
from smdistributed.modelparallel.tensorflow.execute.replay import Call
from smdistributed.modelparallel.tensorflow.planning.kept_state import (
    Kept,
    kept_for,
    live_optimizers,
)
from smdistributed.modelparallel.tensorflow.planning.layers import MEMORY_WEIGHTS
from smdistributed.modelparallel.tensorflow.planning.unit_profile import (
    CallFigures,
    beside_model,
    unit_profile,
)
from smdistributed.modelparallel.tensorflow.record.work import Work
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime

logger = logging.getLogger(__name__)

#: What is taken where an optimizer cannot be copied: two moments in single precision.
_USUAL_BYTES = 8
#: A process that ends at its first step does not come to what the script does with gradients.
_AVERAGED = (
    "lines with replicas are for scripts that average gradients over them, as fit does, and "
    "smp.allreduce in a loop of one's own"
)
#: The scope of what a step function makes for its first microbatch.
_FIRST = "microbatch_0"


def profile_of(
    runtime: TFRuntime,
    name: str,
    calls: Sequence[Call],
    num_models: int,
    made: Sequence[Any],
    batch: int,
    share: float,
) -> ModelProfile:
    """Returns the profile of a step function whose graph is made, of a batch of known size.

    Args:
        runtime: of this process.
        name: of the function.
        calls: of its first microbatch.
        num_models: that it calls.
        made: the operations that it makes itself, for all microbatches.
        batch: examples of all microbatches.
        share: of them in the first one.

    Raises:
        UnsupportedError: it calls several models.
    """
    if num_models != 1:
        raise UnsupportedError(
            "the planner plans for steps of one smp.DistributedModel; step function "
            f"{name} calls {num_models}: plan for the larger one in a step of its own."
        )
    config = runtime.config if runtime.planning is None else runtime.planning.config
    traces = [call.local.plan.trace for call in calls]
    counted = [CallFigures.of(trace) for trace in traces]
    optimizers = Optimizers()
    own = [op for op in made if _FIRST in op.name.split("/")]
    beside, work = beside_model(tf.compat.v1.get_default_graph(), own)
    return ModelProfile(
        framework="tensorflow",
        step=name,
        optimizer=", ".join(optimizers.names),
        batch=batch,
        examples=round(batch * share),
        precision=_precision(sum((each.all_work for each in counted), work)),
        root=unit_profile(list(zip(traces, counted, strict=True)), optimizers.kept_for),
        beside=beside,
        settings=config.given(),
        memory_weights=MEMORY_WEIGHTS,
        adds_gradients=True,
        graphs=False,
        notes=(*optimizers.notes, *([] if config.horovod else [_AVERAGED])),
    )


class Optimizers:
    """The optimizers of this process, and what they keep.

    Attributes:
        names: of their classes.
        notes: what a reader of a plan should know of them.
    """

    def __init__(self) -> None:
        self._live = live_optimizers()
        self.names = [type(each).__name__ for each in self._live]
        self.notes: list[str] = []
        self._kept = functools.cache(self._tried)
        if not self._live:
            self.notes.append(
                "no optimizer was there before the first training step: memory of optimizers is "
                "not counted"
            )
        elif len(self._live) > 1:
            self.notes.append(
                "of several optimizers the one that keeps most is taken for each variable"
            )

    def kept_for(self, variable: Any) -> Kept:
        """Returns what the optimizer costs for a variable that trains."""
        form = tuple(variable.shape), variable.dtype.name
        found = [self._kept(place, *form) for place in range(len(self._live))]
        return max(found, key=lambda each: each.num_bytes, default=Kept())

    def _tried(self, place: int, shape: tuple[int, ...], dtype: str) -> Kept:
        optimizer = self._live[place]
        try:
            return kept_for(optimizer, shape, dtype)
        except Exception as error:
            logger.debug("%r is not tried", optimizer, exc_info=True)
            note = (
                f"{type(optimizer).__name__} cannot be copied from its configuration "
                f"({type(error).__name__}): {_USUAL_BYTES} bytes a number are taken"
            )
            if note not in self.notes:
                self.notes.append(note)
            return Kept(float(_USUAL_BYTES * tf.TensorShape(shape).num_elements()))


def _precision(work: Work) -> Precision:
    """Returns what most products compute in."""
    if 2 * work.half_products > work.products:
        return "half"
    return "tf32" if tf.config.experimental.tensor_float_32_execution_enabled() else "single"
