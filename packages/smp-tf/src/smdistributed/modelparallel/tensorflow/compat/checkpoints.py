"""The note that TensorFlow's own managers keep of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from tensorflow.python.checkpoint import checkpoint_management


def write_checkpoint_state(directory: str, newest: str, every: Sequence[str]) -> None:
    """Writes the text file in which TensorFlow's managers note their checkpoints."""
    checkpoint_management.update_checkpoint_state_internal(
        directory, newest, all_model_checkpoint_paths=list(every), save_relative_paths=True
    )
