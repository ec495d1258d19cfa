"""The public functions of the TensorFlow package, bound to the runtime of this process."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from smdistributed.modelparallel.common.facade import Facade
from smdistributed.modelparallel.common.runtime import RuntimeSlot
from smdistributed.modelparallel.tensorflow import compat, step_function, whole_gradients
from smdistributed.modelparallel.tensorflow.checkpoint import (
    CheckpointManager as BaseCheckpointManager,
)
from smdistributed.modelparallel.tensorflow.model import DistributedModel as BaseModel
from smdistributed.modelparallel.tensorflow.placement import check_index
from smdistributed.modelparallel.tensorflow.replicas import averaged, broadcast_from_first
from smdistributed.modelparallel.tensorflow.runtime import TFRuntime, start
from smdistributed.modelparallel.tensorflow.tracing import PARTITION

slot: RuntimeSlot[TFRuntime] = RuntimeSlot()
facade = Facade(slot)


def init(config: Mapping[str, object] | str | os.PathLike[str] | None = None) -> None:
    """Starts the library in this process: reads the configuration, joins the job, builds groups.

    Call it first, before TensorFlow has computed anything. Collective: every process. A second call
    has no effect but a warning.

    Args:
        config: parameters by name, or the path of a YAML or JSON file with them. What the launcher
            set in ``SM_HP_MP_PARAMETERS`` wins over it, key by key.

    Raises:
        ConfigError: the configuration breaks a rule; the message lists all problems.

    Source: smd_model_parallel_common_api.rst, The Library's Core APIs.
    """
    is_first = not slot.is_filled
    start(slot, config)
    if is_first:
        runtime = slot.get()
        runtime.replacements.enter_context(whole_gradients.in_optimizers(runtime))


def step(
    non_split_inputs: Iterable[str] | Callable[..., Any] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Decorates a function that computes one mini-batch: outputs, losses, gradients.

    Usable as ``@smp.step``, ``@smp.step()`` and ``@smp.step(...)``, eagerly and inside the caller's
    ``tf.function``. See ``StepFunction`` for what a call does. Collective: every process.

    Args:
        non_split_inputs: names of arguments given whole to every microbatch; or the function,
            when used without parentheses.
        input_split_axes: batch axis by argument name; 0 for all others.
        args: an ``input_signature``, the first that ``tf.function`` takes besides the function.
        kwargs: what ``tf.function`` takes.

    Raises:
        ConfigError: an option names no argument of the function.
        TypeError: more than one argument by position besides.

    Source: smd_model_parallel_common_api.rst, The Library's Core APIs.
    """
    if len(args) > 1:
        raise TypeError(
            "smp.step takes non_split_inputs, input_split_axes and input_signature by position; "
            f"got {len(args) - 1} more: give them by keyword."
        )
    options = dict(zip(("input_signature",), args, strict=False)) | kwargs
    function, names = non_split_inputs, None
    if not callable(function):
        function, names = None, function
    return step_function.step(
        slot, function, non_split_inputs=names, input_split_axes=input_split_axes, **options
    )


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
    with compat.attributes({PARTITION: index}):
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
        raise TypeError(f"a post-partition hook is a function without arguments; got {hook!r}.")
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


def allreduce(value: Any) -> Any:
    """Returns the mean of a tensor over the data-parallel group of this process.

    For gradients after ``accumulate``, where the script does not call Horovod itself. With
    ``horovod: True`` this is Horovod's, else TensorFlow's own. Collective: the data-parallel group.
    """
    return averaged(slot.get(), value)


def clip_by_global_norm(gradients: Sequence[Any], clip_norm: Any) -> tuple[list[Any], Any]:
    """Returns gradients of this process, scaled as one process would do it, and their norm.

    As ``tf.clip_by_global_norm``, but the norm is that of the gradients of all partitions together.
    Keras's optimizers with ``global_clipnorm`` do that by themselves. Usable eagerly and in a
    ``tf.function``, outside step functions. Collective: every process of the pipeline.

    Args:
        gradients: of the trainable variables of this process: tensors, ``tf.IndexedSlices``, None.
        clip_norm: greatest norm.
    """
    return whole_gradients.clip_by_global_norm(slot.get(), gradients, clip_norm)


def broadcast_variables(variables: Iterable[Any]) -> None:
    """Gives variables the values that the first rank of the data-parallel group has.

    After the first batch, for the model's and the optimizer's. Collective: the data-parallel group.
    """
    broadcast_from_first(slot.get(), list(variables))


class CheckpointManager(BaseCheckpointManager):
    """See the base class.

    Args:
        checkpoint: a ``tf.train.Checkpoint``, for example of the optimizer and the model.
        directory: where to; all processes see the same one.
        max_to_keep: number of checkpoints kept; None keeps all.
        checkpoint_name: beginning of the names.
    """

    def __init__(
        self,
        checkpoint: Any,
        directory: str | os.PathLike[str] = "/opt/ml/checkpoints",
        max_to_keep: int | None = None,
        checkpoint_name: str = "ckpt",
    ) -> None:
        super().__init__(slot.get(), checkpoint, directory, max_to_keep, checkpoint_name)


class DistributedModel(BaseModel):  # noqa: D101 - as its base
    __doc__ = BaseModel.__doc__
    _smp_slot = slot
