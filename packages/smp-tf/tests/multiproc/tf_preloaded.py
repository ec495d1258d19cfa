"""What copies of one process have from the start: TensorFlow, Keras and the library.

TensorFlow reads its variables when it is imported. It must not begin here: a copy of a process has
none of its threads.
"""

from __future__ import annotations

import os
from pathlib import Path

from tf_worlds import QUIET

os.environ.update(QUIET)

import pytest  # noqa: F401
import tensorflow as tf

import smdistributed.modelparallel.tensorflow  # noqa: F401

tf.keras.layers.Dense  # noqa: B018 - Keras is imported when it is first asked for

if len(list(Path("/proc/self/task").iterdir())) > 1:
    raise RuntimeError("what is imported here must start no threads: it has.")
