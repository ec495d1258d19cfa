"""What scripts without seeds draw: the same on all processes of a pipeline.

Each process of a pipeline runs the script. Where this draws an order of examples, as ``fit`` does,
each would train on other ones: one process has the examples, another one their labels.
"""

from __future__ import annotations

import random
import secrets

import numpy as np
import tensorflow as tf

from smdistributed.modelparallel.common.comm.communicator import Communicator
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.tensorflow.compat import processes


def draw_alike(communicator: Communicator) -> None:
    """Lets Python, NumPy and TensorFlow draw what they draw on the first process of the pipeline.

    What the script has seeded stays, and what it seeds later wins. Collective: pipeline.
    """
    given = processes.seed()
    seed = secrets.randbits(31) if given is None else given
    own = (random.getstate(), np.random.get_state(), seed)
    of_python, of_numpy, seed = communicator.allgather(own, CommGroup.PP_GROUP)[0]
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    if given != seed:
        tf.random.set_seed(seed)
