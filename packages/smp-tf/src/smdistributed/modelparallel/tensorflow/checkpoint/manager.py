"""``CheckpointManager``: checkpoints of a model that is spread over processes.

Every partition writes what lives there, through the crash-safe directory of smp-common; names do
not depend on the partition, so that a checkpoint can be restored with another number of partitions.

Source: smd_model_parallel_tensorflow.rst, CheckpointManager.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from smdistributed.modelparallel.common.checkpoint.directory import CheckpointDirectory
from smdistributed.modelparallel.common.checkpoint.store import Checkpoint
from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.tensorflow.checkpoint.names import (
    CheckpointNames,
    build_optimizers,
)
from smdistributed.modelparallel.tensorflow.compat.checkpoints import write_checkpoint_state
from smdistributed.modelparallel.tensorflow.compat.operations import unnoted
from smdistributed.modelparallel.tensorflow.gradients.kept import in_all_processes
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime


class CheckpointManager(tf.train.CheckpointManager):  # type: ignore[misc]
    """Saves and restores a ``tf.train.Checkpoint`` whose model is spread over processes.

    Args:
        runtime: of this process.
        checkpoint: of the model, the optimizer, and variables of one's own.
        directory: where to; all processes see the same one.
        max_to_keep: number of checkpoints kept; None keeps all.
        checkpoint_name: beginning of the names.

    Raises:
        TypeError: ``checkpoint`` is no ``tf.train.Checkpoint``.
        ValueError: ``max_to_keep`` is below 1.
    """

    def __init__(
        self,
        runtime: TFRuntime,
        checkpoint: Any,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        checkpoint_name: str,
    ) -> None:
        if not isinstance(checkpoint, tf.train.Checkpoint):
            raise TypeError(
                "CheckpointManager takes a tf.train.Checkpoint, for example "
                f"tf.train.Checkpoint(model=model, optimizer=optimizer); received {checkpoint!r}."
            )
        if max_to_keep is not None and (isinstance(max_to_keep, bool) or max_to_keep < 1):
            raise ValueError(
                f"max_to_keep is the number of checkpoints to keep, 1 or more, or None for all; "
                f"received {max_to_keep!r}."
            )
        super().__init__(
            checkpoint, os.fspath(directory), max_to_keep, checkpoint_name=checkpoint_name
        )
        self._runtime = runtime
        self._keep = max_to_keep
        self._name = checkpoint_name
        self._files = CheckpointDirectory(
            directory,
            rank=runtime.rank,
            gather=lambda each: runtime.communicator.allgather(each, CommGroup.WORLD),
        )

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the checkpoints of this name in the directory, the oldest first."""
        return [self._path(number) for number in sorted(self._numbers())]

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest checkpoint of this name; None before the first."""
        return self.checkpoints[-1] if self._numbers() else None

    def save(self, checkpoint_number: int | None = None, **options: Any) -> str:
        """Writes a new checkpoint and removes old ones; returns its path when all is on disk.

        Collective: every process.

        Args:
            checkpoint_number: part of its name; by default one more than the highest.
            options: what ``tf.train.CheckpointManager.save`` takes besides; without effect.

        Raises:
            CheckpointError: on all processes, when any could not write.
            NotPartitionedError: before the first call of a step function.
        """
        if options:
            warnings.warn(f"save ignores {', '.join(options)}.", stacklevel=2)
        number = int(checkpoint_number or max(self._numbers(), default=0) + 1)
        self.checkpoint.save_counter.assign(number)
        files = {}
        if self._runtime.coordinates.dp_rank == 0:
            name = f"part-{self._runtime.coordinates.pp_rank}.npz"
            values = {key: in_all_processes(self._runtime, each) for key, each in self._variables()}
            files[name] = functools.partial(_write, values)
        self._files.write_partial(f"{self._name}-{number}", files, keep=self._keep)
        doing = f"Noting {self._name}-{number} in {self.directory}"
        self._files.everywhere(doing, self._write_state)
        return self._path(number)

    def restore(self) -> str | None:
        """Restores the newest checkpoint; returns its path, or None if there is none.

        At any time. Before the model is partitioned a script's own variables are restored at once,
        and what optimizers count; models and the rest are remembered, and restored in the first
        call of a step function, before anything is computed. Collective: every process.

        Raises:
            CheckpointError: it is damaged, or does not have what the model needs.
        """
        found = self.latest_checkpoint
        if found is None:
            return None
        tag = os.path.basename(found)
        is_early = not CheckpointNames(self.checkpoint).are_partitioned
        self._read_when_partitioned(tag, self._read_what_is_there(tag) if is_early else ())
        return found

    def restore_or_initialize(self) -> str | None:
        """Same as ``restore``: variables have their initial values otherwise."""
        return self.restore()

    def saved(self, *names: str) -> list[Any]:
        """Returns what the newest checkpoint has of variables that every process keeps.

        Collective: every process.

        Raises:
            CheckpointError: it is damaged.
        """
        tag = os.path.basename(self.latest_checkpoint or "")
        checkpoint = self._files.resolve(tag)
        found: list[Any] = []

        def find() -> None:
            part = np.load(checkpoint.open(min(checkpoint.paths)))
            found.extend(part[name] for name in names)

        self._files.everywhere(f"Reading {tag}", find)
        return found

    def _read_when_partitioned(self, tag: str, done: Collection[str]) -> None:
        if CheckpointNames(self.checkpoint).are_partitioned:
            self._read(tag, done)
        else:
            again = functools.partial(self._read_when_partitioned, tag, done)
            self._runtime.post_partition_hooks.append(again)

    def _read_what_is_there(self, tag: str) -> list[str]:
        """Restores what scripts ask for to go on: counts of epochs and steps, a best loss.

        Returns:
            the names of what was restored, which the script may change from now on.
        """
        checkpoint = self._files.resolve(tag)
        done: list[str] = []

        def read() -> None:
            # Every part has them.
            part = np.load(checkpoint.open(min(checkpoint.paths)))
            for key, variable in CheckpointNames(self.checkpoint).without_models():
                if key in part.files and part[key].shape == tuple(variable.shape):
                    _assign(variable, part[key])
                    done.append(key)

        self._files.everywhere(f"Restoring {tag}", read)
        return done

    def _read(self, tag: str, done: Collection[str]) -> None:
        checkpoint = self._files.resolve(tag)
        places: dict[str, tuple[Any, str]] = {}
        variables: dict[str, Any] = {}

        def find() -> None:
            for name in sorted(checkpoint.paths):
                part = np.load(checkpoint.open(name))
                places.update((key, (part, key)) for key in part.files)
            renumbered = CheckpointNames(self.checkpoint).renumbered(places)
            if renumbered:
                own, saved = next(iter(renumbered.items()))
                warnings.warn(
                    f"checkpoint '{checkpoint.tag}' was saved from layers that Keras had given "
                    f"other numbers ({saved} is {own} here): they are taken in the order of these. "
                    "Give layers names, by which they are found whatever is built before.",
                    stacklevel=2,
                )
            moved = {own: places[saved] for own, saved in renumbered.items()}
            for name in renumbered.values():
                places.pop(name, None)
            places.update(moved)
            build_optimizers(self.checkpoint, places)
            variables.update(self._variables())

        self._files.everywhere(f"Restoring {tag}", find)
        everyone = self._runtime.communicator.allgather(list(variables), CommGroup.WORLD)
        taken = {name for names in everyone for name in names}
        self._files.everywhere(
            f"Restoring {tag}", lambda: self._assign(checkpoint, variables, places, taken, done)
        )

    def _assign(
        self,
        checkpoint: Checkpoint,
        variables: Mapping[str, Any],
        places: Mapping[str, tuple[Any, str]],
        taken: Collection[str],
        done: Collection[str],
    ) -> None:
        for verb, names, where in (
            ("lacks", sorted(set(variables) - set(places)), "of this process"),
            (
                "has",
                CheckpointNames(self.checkpoint).leftover(places, taken),
                "that nothing here takes",
            ),
        ):
            if names:
                raise CheckpointError(
                    f"checkpoint '{checkpoint.tag}' {verb} {len(names)} variables {where} "
                    f"({', '.join(names[:4])}{', ...' if len(names) > 4 else ''}): restore it into "
                    "the model and optimizer that it was saved from."
                )
        for key, variable in variables.items():
            part, name = places[key]
            value = part[name]
            if tuple(value.shape) != tuple(variable.shape):
                raise CheckpointError(
                    f"{key} has the shape {tuple(variable.shape)}; checkpoint '{checkpoint.tag}' "
                    f"has {value.shape}: restore it into the model that it was saved from."
                )
            if key not in done:
                _assign(variable, value)

    def _variables(self) -> Iterator[tuple[str, Any]]:
        yield "smp/step_number", self._runtime.step_number
        yield from CheckpointNames(self.checkpoint).variables()

    def _numbers(self) -> list[int]:
        prefix = f"{self._name}-"
        names = [one.tag.name for one in self._files.checkpoints() if one.tag.is_partial]
        numbers = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        return [int(number) for number in numbers if number.isdigit()]

    def _path(self, number: int) -> str:
        return str(Path(self.directory, f"{self._name}-{number}"))

    def _write_state(self) -> None:
        """Writes the text file ``checkpoint`` that TensorFlow's managers keep; on one rank."""
        paths = self.checkpoints
        if self._runtime.rank == 0:
            write_checkpoint_state(self.directory, paths[-1], paths)


def _assign(variable: Any, value: Any) -> None:
    """Assigns a saved array, whose type NumPy may not know."""
    dtype = variable.dtype.as_numpy_dtype
    variable.assign(value if value.dtype == dtype else value.view(dtype))


def _write(values: Mapping[str, Any], stream: BinaryIO) -> None:
    with unnoted():
        arrays = {key: tf.convert_to_tensor(each).numpy() for key, each in values.items()}
    np.savez(stream, **arrays)
