"""TensorFlow's servers, through which processes reach each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, tensorflow_server_pb2
from tensorflow.python.eager import cancellation, context
from tensorflow.python.training.server_lib import ClusterSpec

from smdistributed.modelparallel.tensorflow.compat.replaced import Replacement, replaced

_DERIVED = b"type.googleapis.com/tensorflow.DerivedStatus"


def has_begun() -> bool:
    """Tells whether TensorFlow's runtime has started, after which it cannot join others."""
    return context.context()._context_handle is not None


def seed() -> int | None:
    """Returns what the script has given ``tf.random.set_seed``; None if it has not."""
    given: int | None = context.global_seed()
    return given


def let_idle_threads_sleep() -> None:
    """Has threads without work sleep at once, which look for some in turns for a while otherwise.

    Before TensorFlow's runtime starts. Those that look take time from others that compute where
    there are more threads than cores.
    """
    config = config_pb2.ConfigProto()
    config.experimental.disable_thread_spinning = True
    context.context()._config = config


def join_cluster(addresses: Sequence[str], rank: int, use_nccl: bool) -> None:
    """Starts this process's server, through which TensorFlow's collectives reach the others.

    Args:
        addresses: ``host:port`` of every process.
        rank: of this one.
        use_nccl: carry tensors on GPUs with NCCL.
    """
    cluster = ClusterSpec({"smp": list(addresses)})
    eager = context.context()
    eager.configure_collective_ops(
        collective_leader="/job:smp/replica:0/task:0",
        use_nccl_communication=use_nccl,
        device_filters=[f"/job:smp/task:{rank}"],
    )
    eager.enable_collective_ops(
        tensorflow_server_pb2.ServerDef(
            cluster=cluster.as_cluster_def(),
            default_session_config=eager.config,
            job_name="smp",
            task_index=rank,
            protocol="grpc",
        )
    )


def surviving_calls(managers: deque[Any]) -> AbstractContextManager[None]:
    """Within, what calls of functions leave under way may end after the calls.

    Where a transfer fails, TensorFlow ends the call at once. What it had asked of other processes
    is answered a moment later, and then takes itself off the call's list of what is to be
    cancelled; if that is gone with the call, the process crashes. So lists are made here, and
    outlive the calls.

    Args:
        managers: keeps the lists, of as many calls as it is long.
    """

    def make(original: Any) -> Any:
        def manager() -> Any:
            asked: Any = original()
            if asked is None:
                asked = cancellation.CancellationManager()
                managers.append(asked)
            return asked

        return manager

    return replaced([Replacement(cancellation, "context", make)])


def end_collectives(message: str, is_late: bool = False) -> None:
    """Makes all collectives of this process fail, present and later ones, here and at the others.

    Args:
        message: in the errors that the others get.
        is_late: the error is that of a time-out.
    """
    code = tf.errors.DEADLINE_EXCEEDED if is_late else tf.errors.ABORTED
    context.context().abort_collective_ops(code, message)


def silent_processes(ranks: Sequence[int], timeout_seconds: float) -> list[int]:
    """Returns those of the processes whose server does not answer.

    Args:
        ranks: processes to ask, after ``join_cluster``.
        timeout_seconds: how long to wait for each.
    """
    found = []
    for rank in ranks:
        try:
            context.context().check_collective_ops_peer_health(
                f"/job:smp/replica:0/task:{rank}", round(1000 * timeout_seconds)
            )
        except tf.errors.OpError:
            found.append(rank)
    return found


def is_consequence(error: Any) -> bool:
    """Tells whether TensorFlow cancelled something since another operation here had failed."""
    return _DERIVED in error.experimental_payloads
