"""What copies of one process have from the start: TensorFlow, Keras and the library.

TensorFlow reads its variables when it is imported.

Nothing may be computed here, for what has computed must not fork.
"""

from __future__ import annotations

import os

from tf_worlds import QUIET

os.environ.update(QUIET)

import pytest  # noqa: F401
import tensorflow as tf

import smdistributed.modelparallel.tensorflow  # noqa: F401

tf.keras.layers.Dense  # noqa: B018 - Keras is imported when it is first asked for
