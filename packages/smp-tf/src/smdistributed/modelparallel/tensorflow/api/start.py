"""Starting the library; the slot that holds its state in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping

from smdistributed.modelparallel.common.facade import Facade
from smdistributed.modelparallel.common.failure import explaining
from smdistributed.modelparallel.common.runtime import RuntimeSlot
from smdistributed.modelparallel.tensorflow.gradients import following, whole
from smdistributed.modelparallel.tensorflow.runtime.runtime import TFRuntime, start
from smdistributed.modelparallel.tensorflow.stepping import alike

slot: RuntimeSlot[TFRuntime] = RuntimeSlot()
facade = Facade(slot)


def init(config: Mapping[str, object] | str | os.PathLike[str] | None = None) -> None:
    """Starts the library in this process: reads the configuration, joins the job, builds groups.

    Call it first, before TensorFlow has computed anything. Collective: every process. A second call
    has no effect but a warning.

    Args:
        config: parameters by name, or the path of a YAML or JSON file with them. What the launcher
            set in ``SM_HP_MP_PARAMETERS`` wins over it, key by key.

    Raises:
        ConfigError: the configuration breaks a rule; the message lists all problems.

    Source: smd_model_parallel_common_api.rst, The Library's Core APIs.
    """
    is_first = not slot.is_filled
    start(slot, config)
    if is_first:
        runtime = slot.get()
        runtime.replacements.enter_context(whole.in_optimizers(runtime))
        if runtime.topology.pp_size > 1:
            runtime.replacements.enter_context(following.followed(runtime))
            runtime.replacements.enter_context(explaining(alike.explained))
