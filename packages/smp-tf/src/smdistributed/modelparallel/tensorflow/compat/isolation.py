"""Running a function as if nothing around it were under way: no graph, no scope, no tape."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

from tensorflow.python.ops import summary_ops_v2

from smdistributed.modelparallel.tensorflow.compat import keras


def apart(function: Callable[[], Any]) -> Any:
    """Returns what a function returns that runs eagerly, in a thread of its own.

    ``tf.init_scope`` leaves graphs, too, but stops the recording of all tapes: one that the
    function makes itself would record nothing. Tapes belong to a thread; here none of the caller's
    sees anything, and those of the function do.
    """
    outcome: dict[str, Any] = {}
    carried = [(state, dict(vars(state))) for state in _states()]
    context = contextvars.copy_context()

    def run() -> None:
        for state, values in carried:
            vars(state).update(values)
        try:
            outcome["value"] = context.run(function)
        except BaseException as error:
            outcome["error"] = error
        outcome["states"] = [dict(vars(state)) for state, _ in carried]

    thread = threading.Thread(target=run, name="smp-trace", daemon=True)
    thread.start()
    thread.join()
    for (state, _), values in zip(carried, outcome["states"], strict=True):
        vars(state).update(values)
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def _states() -> list[threading.local]:
    """Returns what libraries keep of a thread that a function may be meant to see."""
    return [summary_ops_v2._summary_state, *keras.thread_states()]
