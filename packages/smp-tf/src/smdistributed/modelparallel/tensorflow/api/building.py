"""Models, where their operations go, and what is done when they are partitioned."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from smdistributed.modelparallel.tensorflow.api.start import slot
from smdistributed.modelparallel.tensorflow.checkpoint.backups import back_up
from smdistributed.modelparallel.tensorflow.compat import graphs
from smdistributed.modelparallel.tensorflow.model.distributed import DistributedModel as BaseModel
from smdistributed.modelparallel.tensorflow.planning.placement import check_index
from smdistributed.modelparallel.tensorflow.record.tracing import PARTITION


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Within, operations that ``call`` of the model makes go to this partition.

    The innermost one counts. Without effect where ``auto_partition`` is true.

    Raises:
        ValueError: there is no partition of this index.

    Source: smd_model_parallel_tensorflow.rst, partition.
    """
    runtime = slot.get()
    if runtime.config.auto_partition:
        yield
        return
    check_index(index, runtime.topology.pp_size)
    with graphs.attributes({PARTITION: index}):
        yield


def register_post_partition_hook(hook: Callable[[], Any]) -> Callable[[], Any]:
    """Registers a function to run once, eagerly, when the model has been partitioned.

    That is in the first call of a step function, before anything is computed: the place to restore
    a checkpoint. Hooks run in the order of registration.

    Args:
        hook: takes nothing.

    Returns:
        The hook, so that this is usable as a decorator.

    Raises:
        TypeError: the hook is not callable.

    Source: smd_model_parallel_tensorflow.rst, register_post_partition_hook.
    """
    if not callable(hook):
        raise TypeError(
            f"a post-partition hook is a function without arguments; received {hook!r}."
        )
    runtime = slot.get()
    if runtime.is_partitioned:
        warnings.warn(
            "the model is partitioned already; the post-partition hook will not run: register it "
            "before the first call of a step function.",
            stacklevel=2,
        )
    else:
        runtime.post_partition_hooks.append(hook)
    return hook


class DistributedModel(BaseModel):  # noqa: D101 - as its base
    __doc__ = BaseModel.__doc__
    _smp_slot = slot

    def _smp_back_up(self, callback: Any) -> None:
        back_up(slot.get(), self, callback)
