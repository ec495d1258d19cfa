"""Starting the library."""

from __future__ import annotations

import os
from collections.abc import Mapping

from smdistributed.modelparallel.common.failure import remarking
from smdistributed.modelparallel.torch.absence.optimizers import gradients_hidden_from_optimizers
from smdistributed.modelparallel.torch.api.slot import slot
from smdistributed.modelparallel.torch.compat.original_forward import original_forward
from smdistributed.modelparallel.torch.compat.private.below import scripted_functions_seen
from smdistributed.modelparallel.torch.device_memory.telling import explained_when_out
from smdistributed.modelparallel.torch.gradients.norm import norms_of_whole_models
from smdistributed.modelparallel.torch.gradients.overflow import shared_overflows
from smdistributed.modelparallel.torch.model.adoption import additions_adopted
from smdistributed.modelparallel.torch.optimizer.checks import optimizers_checked
from smdistributed.modelparallel.torch.random.keys import repeatable_checkpoints
from smdistributed.modelparallel.torch.runtime.runtime import start
from smdistributed.modelparallel.torch.stepping.compiling import compiled_inside
from smdistributed.modelparallel.torch.tensor_parallel.auto.inside import computing_when_recomputed
from smdistributed.modelparallel.torch.tensor_parallel.module import distributed_modules_in
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import guarded_when_recomputed


def init(config: Mapping[str, object] | str | os.PathLike[str] | None = None) -> None:
    """Starts the library in this process: reads the configuration, joins the job, builds groups.

    Call it first. Collective: every process. A second call has no effect but a warning.

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
        runtime.replacements.enter_context(remarking(explained_when_out(runtime)))
        runtime.replacements.enter_context(norms_of_whole_models(runtime))
        runtime.replacements.enter_context(gradients_hidden_from_optimizers())
        runtime.replacements.enter_context(optimizers_checked(runtime))
        runtime.replacements.enter_context(shared_overflows(runtime))
        if runtime.sharding_groups is not None or runtime.topology.mp_size > 1:
            runtime.replacements.enter_context(scripted_functions_seen())
        runtime.replacements.enter_context(repeatable_checkpoints(runtime.random))
        if runtime.topology.tp_size > 1:
            runtime.replacements.enter_context(guarded_when_recomputed())
            runtime.replacements.enter_context(computing_when_recomputed())
        if runtime.tensor_group.passes is not None:
            runtime.replacements.enter_context(runtime.tensor_group.passes.noting_checkpoints())
        runtime.replacements.enter_context(additions_adopted(runtime))
        runtime.replacements.enter_context(compiled_inside())
        runtime.replacements.enter_context(original_forward())
        runtime.replacements.enter_context(distributed_modules_in(runtime.tensor_group))
