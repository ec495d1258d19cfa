"""Which process holds which variable of a model; the others allocate nothing for it.

Variables that a model makes while it is traced get no memory. Where each one lives is known once
the operations that read it have a partition; then its process gives it the initial value. Variables
that existed before (made in a constructor) are given back on the processes that do not hold them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import NotPartitionedError, PartitionError
from smdistributed.modelparallel.tensorflow.compat import keras
from smdistributed.modelparallel.tensorflow.compat.initial import InitialValue, lifted
from smdistributed.modelparallel.tensorflow.compat.operations import is_unnoted, unnoted
from smdistributed.modelparallel.tensorflow.compat.variables import empty_variable, free, number
from smdistributed.modelparallel.tensorflow.parameters.moments import (
    Changes,
    Moments,
    note_changes,
)
from smdistributed.modelparallel.tensorflow.parameters.owners import Owner, owner_of, stand_in


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


def is_here(variable: Any) -> bool:
    """Tells whether a variable has a value in this process."""
    home = home_of(variable)
    return home is None or home.is_here


def path_of(variable: Any) -> str:
    """Returns the name of a variable with its layers, where the library knows it."""
    return str(getattr(variable, "_smp_path", variable.name))


def _too_early(variable: Any) -> NotPartitionedError:
    return NotPartitionedError(
        f"variable {path_of(variable)} has no value before the model is partitioned, which the "
        "first call of a step function does: use it after that, or in a function registered with "
        "smp.register_post_partition_hook."
    )


class AccessGuard:
    """Knows which variables have a value in this process, and refuses those that have none yet.

    Args:
        num_partitions: of models.
        moments: is told of what Python writes to variables.
    """

    def __init__(self, num_partitions: int, moments: Moments) -> None:
        self._num_partitions = num_partitions
        self._moments = moments
        self._is_suspended = False
        self._is_changing = False

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Within, nothing is refused: operations are only noted, or values come from elsewhere."""
        saved, self._is_suspended = self._is_suspended, True
        try:
            with unnoted():
                yield
        finally:
            self._is_suspended = saved

    def is_here(self, variable: Any) -> bool:
        """Tells whether this process has a value of a variable, or needs to know nothing of it.

        Raises:
            NotPartitionedError: no process has one yet.
        """
        home = getattr(variable, "_smp_home", None)
        if home is None or home.is_here or self._is_suspended:
            return True
        if home.partition is None:
            raise _too_early(variable)
        return False

    def elsewhere(self, variable: Any) -> Any:
        """Returns what stands for the value of a variable that lives in another process."""
        home = variable._smp_home
        owner = owner_of(variable) or Owner(home.partition, False, path_of(variable))
        return stand_in(variable, owner.as_read(self._moments.now))

    @contextlib.contextmanager
    def changing(self, variable: Any) -> Iterator[None]:
        """Within, Python writes to a variable, in all processes alike."""
        owner = owner_of(variable)
        if owner is None or self._is_changing or is_unnoted():
            yield
            return
        self._is_changing = True
        try:
            if not tf.executing_eagerly():
                note_changes(tf.compat.v1.get_default_graph(), Changes.ASSIGNS)
            else:
                if owner.is_here and owner.number is not None:
                    with unnoted():
                        self._moments.keep(owner.number, variable._read_variable_op())
                self._moments.pass_on()
            yield
        finally:
            self._is_changing = False

    def check_saving(self, variable: Any) -> None:
        """Raises unless a checkpoint of TensorFlow can have a variable.

        Raises:
            NotPartitionedError: no process has a value yet.
            PartitionError: it would have a part of a model or an optimizer.
        """
        if not self.is_here(variable):
            home = variable._smp_home
            raise PartitionError(
                f"variable {path_of(variable)} lives on rank {home.rank} (partition "
                f"{home.partition}), not in this process: let smp.CheckpointManager or save_model "
                "collect it, where tf.train.Checkpoint would write a part."
            )
        trained = getattr(variable, "_smp_slot_of", None)
        if self._num_partitions > 1 and home_of(trained) is not None and not self._is_suspended:
            raise PartitionError(
                f"{variable.name} belongs to an optimizer of a model that is spread over "
                f"{self._num_partitions} partitions, of which this process has its part only: save "
                "it with smp.CheckpointManager."
            )

    def restore(self, variable: Any, value: Any) -> bool:
        """Takes a value that a checkpoint of TensorFlow has for a variable.

        Returns:
            whether that is all, since the variable lives elsewhere.

        Raises:
            NotPartitionedError: it is not known yet where it lives.
        """
        home = getattr(variable, "_smp_home", None)
        if home is None or home.is_here:
            return False
        if home.partition is None:
            raise _too_early(variable)
        return True


class ModelVariables:
    """The variables of one model.

    Args:
        partition: of this process.
        ranks: global rank of every partition in this pipeline.

    Attributes:
        made: those that calls of the model made, also those that Keras does not see.
    """

    def __init__(self, partition: int, ranks: list[int]) -> None:
        self.made: list[Any] = []
        self._partition = partition
        self._ranks = ranks
        self._initial_values: dict[int, tuple[Any, InitialValue]] = {}
        self._numbered: dict[int, Any] = {}

    def create(self, next_creator: Callable[..., Any], **arguments: Any) -> Any:
        """Makes a variable without memory; a creator as ``tf.variable_creator_scope`` takes it."""
        initial_value = arguments.get("initial_value")
        if tf.is_tensor(initial_value) and hasattr(initial_value, "graph"):
            initial_value = lifted(initial_value)  # it was computed in the call of the model
        if not callable(initial_value):
            return next_creator(**arguments)
        try:
            initial = InitialValue(initial_value, arguments.get("dtype"))
        except Exception as error:
            error.add_note(
                f"raised by the initial value of variable {arguments.get('name')}, which is noted "
                "as a graph: compute it by operations of TensorFlow, or by NumPy alone."
            )
            raise
        variable = empty_variable(initial.like, arguments)
        variable._smp_home = Home()
        self.made.append(variable)
        self.number([variable])
        self._initial_values[id(variable)] = (variable, initial)
        return variable

    def number(self, variables: Iterable[Any]) -> None:
        """Gives variables numbers, by which they are in one order in all processes."""
        for variable in variables:
            if id(variable) not in self._numbered:
                self._numbered[id(variable)] = variable
                number(variable, len(self._numbered))

    def claim(
        self, homes: Mapping[int, int], variables: Iterable[Any], changed: Collection[int]
    ) -> None:
        """Gives homes to variables that are not the model's but are changed by its call.

        They have a value everywhere, which from now on is the right one in one process only.

        Args:
            homes: partition by ``id``.
            variables: that are not the model's.
            changed: ``id`` of each variable that the call may change.
        """
        for variable in variables:
            if id(variable) in changed and home_of(variable) is None:
                partition = homes[id(variable)]
                is_here = partition == self._partition
                variable._smp_home = Home(partition, self._ranks[partition], is_here)

    def settle(
        self,
        homes: dict[int, int],
        variables: list[Any],
        default: int,
        metrics: Collection[int],
    ) -> list[Any]:
        """Gives variables the partition where they live from now on, and their memory there.

        Args:
            homes: partition by ``id`` of TensorFlow's variable, for those that are known. Others
                are added: what a later call does with them is done where they live.
            variables: all of the model.
            default: partition of those that nothing reads yet.
            metrics: ``id`` of each variable of a metric. Those that the call does not use are
                every process's own: a training loop updates them with what all processes have.

        Returns:
            those that live in this process since now.
        """
        begun = []
        every = {id(v): v for v in map(keras.variable_of, variables)}
        paths = {id(keras.variable_of(v)): keras.path_of(v) for v in variables}
        every |= {id(v): v for v, _ in self._initial_values.values()}
        for key, variable in every.items():
            known = getattr(variable, "_smp_home", None)
            if known is not None and known.partition is not None:
                continue
            if key in metrics and key not in homes:
                continue
            partition = homes.setdefault(key, default)
            is_here = partition == self._partition
            variable._smp_home = Home(partition, self._ranks[partition], is_here)
            variable._smp_path = paths.get(key, variable.name)
            _, initial = self._initial_values.pop(key, (None, None))
            if is_here and initial is not None:
                variable.assign(tf.cast(initial.value(), variable.dtype))
            elif not is_here and initial is None:
                free(variable)
            if is_here:
                begun.append(variable)
        return begun
