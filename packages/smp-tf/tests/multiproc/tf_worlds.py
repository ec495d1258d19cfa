"""The worlds in which bodies of smp-tf run, and what each body begins with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common.testing import Launcher, World

#: Of a batch. Each is traced, which takes most of the time: two show what one leaves to the next.
#: Sessions that run slow tests have more, see ``noxfile.py``.
MICROBATCHES = int(os.environ.get("TF_TESTS_MICROBATCHES", "2"))
#: What a job may be given before each body, since the library reads it in each step.
CHANGED = ("auto_partition", "default_partition", "pipeline")
QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "1",  # warnings tell what fails inside a step
    "OMP_NUM_THREADS": "1",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "NVIDIA_TF32_OVERRIDE": "0",
}
#: What processes that are forked have from their beginning.
PRELOAD = ("tf_preloaded",)
#: On GPUs each process imports TensorFlow itself.
_CAN_FORK = not any(Path("/dev").glob("nvidia[0-9]*"))


def launcher_of(num_ranks: int) -> Launcher:
    """Returns what starts the processes of a job, most of whose start is importing TensorFlow."""
    if num_ranks == 1:
        return "fork" if _CAN_FORK else "python"
    return "smprun-fork" if _CAN_FORK else "smprun"


def one_thread() -> None:
    """Makes TensorFlow use one thread for each of its two pools."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def start_plainly() -> Callable[[], None]:
    """Sets a process up that does without the library."""
    one_thread()
    return _forget


def start(config: dict[str, object]) -> Callable[[dict[str, object]], None]:
    """Starts the library; returns what makes a body find what it would in a new process.

    That takes what of the configuration may change.
    """
    one_thread()
    import smdistributed.modelparallel.tensorflow as smp

    smp.init({"microbatches": MICROBATCHES, "communication_timeout": 60, **config})
    first = library().config

    def begin(settings: dict[str, object]) -> None:
        library().config = first.model_copy(update=settings)
        forget_models()

    return begin


def _forget() -> None:
    import tensorflow as tf

    # Keras numbers layers without names, by which checkpoints know variables.
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(0)


def forget_models() -> None:
    """Makes the next model the first one of this process."""
    _forget()
    runtime = library()
    runtime.step_number.assign(0)
    runtime.is_partitioned = False
    runtime.has_asked_in_vain = False
    runtime.post_partition_hooks.clear()


def library() -> Any:
    """Returns the state of the library in this process."""
    from smdistributed.modelparallel.tensorflow.api.start import slot

    return slot.get()


def world(num_ranks: int, **config: object) -> World:
    """Returns the world of a configuration."""
    settings = {name: config.pop(name) for name in CHANGED if name in config}
    # Horovod starts as its users start it.
    launcher = "smprun" if config.get("horovod") else launcher_of(num_ranks)
    return World(num_ranks, start, (config,), launcher, QUIET, PRELOAD, settings=(settings,))


_MANUAL = {"auto_partition": False, "default_partition": 0}
PLAIN = World(1, start_plainly, (), launcher_of(1), QUIET, PRELOAD)
ONE = world(1, pipeline_parallel_degree=1)
TWO = world(2, pipeline_parallel_degree=2)
TWO_BY_HAND = world(2, pipeline_parallel_degree=2, **_MANUAL)
TWO_SIMPLE = world(2, pipeline_parallel_degree=2, pipeline="simple", **_MANUAL)
FOUR = world(4, pipeline_parallel_degree=4)
TWO_REPLICAS = world(4, pipeline_parallel_degree=2)
