"""What TensorFlow reads of the note that it keeps of checkpoints."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat.checkpoints import write_checkpoint_state


def test_tensorflow_reads_the_state_of_checkpoints(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("ckpt-1", "ckpt-2")]
    write_checkpoint_state(str(tmp_path), paths[-1], paths)
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert state.model_checkpoint_path == paths[-1]
    assert list(state.all_model_checkpoint_paths) == paths
