"""Keras's ``BackupAndRestore``: what a training goes on with, in checkpoints of all processes."""

from __future__ import annotations

import contextlib
import functools
import shutil
from pathlib import Path
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.errors import CheckpointError, UnsupportedError
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.tensorflow.checkpoint.manager import CheckpointManager
from smdistributed.modelparallel.tensorflow.compat import backups
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime

_FOLDER, _NAME = "smp", "backup"
#: What Keras writes of a training without the library.
_OF_KERAS = ("latest.weights.h5", "training_metadata.json", "chief")


def back_up(runtime: TFRuntime, model: Any, callback: Any) -> None:
    """Makes a ``BackupAndRestore`` keep the whole training of a model, its optimizer included.

    Args:
        runtime: of this process.
        model: that is trained.
        callback: of ``fit``.

    Raises:
        UnsupportedError: it is of a class of the user's, or waits for signals.
    """
    own = type(callback) is not tf.keras.callbacks.BackupAndRestore
    if own or getattr(callback, "save_before_preemption", False):
        raise UnsupportedError(
            "of a DistributedModel BackupAndRestore keeps the training in checkpoints of all "
            "processes, as often as save_freq says; received "
            f"{'the class ' + type(callback).__name__ if own else 'save_before_preemption=True'}: "
            "use the class of Keras with a save_freq, or smp.CheckpointManager in a callback."
        )
    backups.keep_in(_Backup(runtime, model, callback), callback)


class _Backup:
    """The checkpoints of one training.

    Args:
        runtime: of this process.
        model: that is trained.
        callback: says where to and how many.
    """

    def __init__(self, runtime: TFRuntime, model: Any, callback: Any) -> None:
        self._runtime = runtime
        self._model = model
        self._asked = callback.backup_dir
        self._keep = 2 if getattr(callback, "double_checkpoint", False) else 1
        self._epoch, self._batch = (
            tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(2)
        )

    @functools.cached_property
    def _given(self) -> Path:
        """The ``backup_dir`` of the first process: others may have made temporary ones."""
        return Path(self._runtime.communicator.from_first(str(self._asked), CommGroup.WORLD))

    @property
    def _folder(self) -> Path:
        return self._given / _FOLDER

    @functools.cached_property
    def _manager(self) -> CheckpointManager:
        checkpoint = tf.train.Checkpoint(
            model=self._model,
            optimizer=self._model.optimizer,
            epoch=self._epoch,
            batch=self._batch,
        )
        return CheckpointManager(self._runtime, checkpoint, self._folder, self._keep, _NAME)

    def save(self, epoch: int, batch: int) -> None:
        """Writes all of the training. Collective: every process."""
        self._epoch.assign(epoch)
        self._batch.assign(batch)
        self._manager.save()

    def restore(self) -> tuple[int, int] | None:
        """Reads the newest checkpoint, see ``CheckpointManager.restore``.

        Collective: every process.

        Returns:
            epoch and batch that were saved; None if there is no checkpoint.

        Raises:
            CheckpointError: it is one of Keras alone, or damaged.
        """
        if any((self._given / name).exists() for name in _OF_KERAS):
            raise CheckpointError(
                f"{self._given} has a backup that was written without the library, of one "
                "process, which several cannot go on with: give another backup_dir, or finish "
                "that training in one process."
            )
        if self._manager.restore() is None:
            return None
        epoch, batch = self._manager.saved("epoch", "batch")
        return int(epoch), int(batch)

    def remove(self) -> None:
        """Removes the checkpoints, and the folder if nothing else is in it.

        Collective: every process.
        """
        self._runtime.communicator.barrier(CommGroup.WORLD)
        if self._runtime.rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._given.rmdir()
        self._runtime.communicator.barrier(CommGroup.WORLD)
