"""What copies of one process have from the start: the libraries below TensorFlow's package.

Nothing may be computed here, for what has computed must not fork.
"""

from __future__ import annotations

import numpy as np  # noqa: F401
import pytest  # noqa: F401
import tensorflow as tf

tf.keras.layers.Dense  # noqa: B018 - Keras is imported when it is first asked for
