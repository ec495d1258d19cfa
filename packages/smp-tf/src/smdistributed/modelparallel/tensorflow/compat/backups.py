"""Where Keras's ``BackupAndRestore`` writes and reads, for versions 2 and 3."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat.keras import IS_KERAS_3, private


class Backup(Protocol):
    """What keeps a training."""

    def save(self, epoch: int, batch: int) -> None:
        """Takes where the training is."""

    def restore(self) -> tuple[int, int] | None:
        """Has the training go on from where it was kept, if it was; returns where that is."""

    def remove(self) -> None:
        """Forgets it."""


def keep_in(backup: Backup, callback: Any) -> None:
    """Makes a ``BackupAndRestore`` write to a backup, and read from it, as often as it does."""
    if not IS_KERAS_3:
        callback.on_train_begin = lambda logs=None: _begin(backup, callback)
        return

    def load() -> None:
        place = backup.restore()
        if place is not None:
            callback.model._initial_epoch = place[0]

    def end(logs: Any = None) -> None:
        if callback.delete_checkpoint:
            backup.remove()

    callback._load_model = load
    callback._save_model = lambda: backup.save(callback._current_epoch, callback._last_batch_seen)
    callback.on_train_end = end


def _begin(backup: Backup, callback: Any) -> None:
    """Begins a training of Keras 2."""
    callback._training_state = callback.model._training_state = _state_of(backup, callback)
    callback._training_state.restore()


def _state_of(backup: Backup, callback: Any) -> Any:
    """Returns what Keras 2 asks where a training goes on."""

    class State(private("distribute.worker_training_state").WorkerTrainingState):  # type: ignore[misc]
        def __init__(self) -> None:
            self._enable_save_before_preemption = False
            self._save_freq = callback.save_freq
            self._ckpt_saved_epoch, self._ckpt_saved_batch = (
                tf.Variable(-1, dtype=tf.int64, trainable=False) for _ in range(2)
            )

        def restore(self) -> None:
            place = backup.restore()
            if place is not None:
                self._ckpt_saved_epoch.assign(place[0])
                self._ckpt_saved_batch.assign(place[1])

        def back_up(self, epoch: int, batch: int = 0) -> None:
            backup.save(int(self._ckpt_saved_epoch), int(self._ckpt_saved_batch))

        def delete_backup(self) -> None:
            backup.remove()

    return State()
