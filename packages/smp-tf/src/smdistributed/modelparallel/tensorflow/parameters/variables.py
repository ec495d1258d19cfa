"""Which process holds which variable of a model; the others allocate nothing for it.

Variables that a model makes while it is traced get no memory. Where each one lives is known once
the operations that read it have a partition; then its process gives it the initial value. Variables
that existed before (made in a constructor) are given back on the processes that do not hold them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import NotPartitionedError, PartitionError
from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.compat.variables import empty_variable, free, number


@dataclass(frozen=True)
class Home:
    """Where a variable lives; kept on the variable.

    Attributes:
        partition: that holds it; None before the model is partitioned.
        rank: global rank of that partition in this pipeline.
        is_here: whether that is this process.
    """

    partition: int | None = None
    rank: int | None = None
    is_here: bool = False


def home_of(variable: Any) -> Home | None:
    """Returns where a variable lives; None for one that no DistributedModel has."""
    return getattr(keras.variable_of(variable), "_smp_home", None)


class AccessGuard:
    """Refuses reads and writes of variables that have no value in this process."""

    def __init__(self) -> None:
        self._is_suspended = False

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Within, nothing is refused: operations are only noted, or values come from elsewhere."""
        saved, self._is_suspended = self._is_suspended, True
        try:
            yield
        finally:
            self._is_suspended = saved

    def check(self, variable: Any) -> None:
        """Raises unless this process has a value of the variable, or needs to know nothing of it.

        Raises:
            NotPartitionedError: no process has one yet.
            PartitionError: another process has it.
        """
        home = getattr(variable, "_smp_home", None)
        if home is None or home.is_here or self._is_suspended:
            return
        if home.partition is None:
            raise NotPartitionedError(
                f"variable {variable.name} has no value before the model is partitioned, which the "
                "first call of a step function does: use it after that, or in a function "
                "registered with smp.register_post_partition_hook."
            )
        raise PartitionError(
            f"variable {variable.name} lives on rank {home.rank} (partition {home.partition}), not "
            "in this process: use it there, or let smp.CheckpointManager or save_model collect it. "
            "model.trainable_variables and model.variables hold those of this process."
        )


class ModelVariables:
    """The variables of one model.

    Args:
        partition: of this process.
        ranks: global rank of every partition in this pipeline.
    """

    def __init__(self, partition: int, ranks: list[int]) -> None:
        self._partition = partition
        self._ranks = ranks
        self._initial_values: dict[int, tuple[Any, Callable[[], Any]]] = {}
        self._numbered: dict[int, Any] = {}

    def create(self, next_creator: Callable[..., Any], **arguments: Any) -> Any:
        """Makes a variable without memory; a creator as ``tf.variable_creator_scope`` takes it."""
        initial_value = arguments.get("initial_value")
        if not callable(initial_value):
            return next_creator(**arguments)
        # Only shape and dtype are wanted: the graph is never run.
        with tf.Graph().as_default():
            like = tf.convert_to_tensor(initial_value(), dtype=arguments.get("dtype"))
        variable = empty_variable(like, arguments)
        variable._smp_home = Home()
        self.number([variable])
        self._initial_values[id(variable)] = (variable, initial_value)
        return variable

    def number(self, variables: Iterable[Any]) -> None:
        """Gives variables numbers, by which they are in one order in all processes."""
        for variable in variables:
            if id(variable) not in self._numbered:
                self._numbered[id(variable)] = variable
                number(variable, len(self._numbered))

    def settle(self, homes: Mapping[int, int], variables: list[Any], default: int) -> None:
        """Gives variables the partition where they live from now on, and their memory there.

        Args:
            homes: partition by ``id`` of TensorFlow's variable, for those that are known.
            variables: all of the model.
            default: partition of those that nothing reads yet.
        """
        every = {id(v): v for v in map(keras.variable_of, variables)}
        every |= {id(v): v for v, _ in self._initial_values.values()}
        for key, variable in every.items():
            known = getattr(variable, "_smp_home", None)
            if known is not None and known.partition is not None:
                continue
            partition = homes.get(key, default)
            is_here = partition == self._partition
            variable._smp_home = Home(partition, self._ranks[partition], is_here)
            _, initial_value = self._initial_values.pop(key, (None, None))
            if is_here and initial_value is not None:
                with warnings.catch_warnings():
                    # Keras warns of a second call, which must give the values of the first.
                    warnings.simplefilter("ignore")
                    value = initial_value()
                variable.assign(tf.cast(value, variable.dtype))
            elif not is_here and initial_value is None:
                free(variable)
