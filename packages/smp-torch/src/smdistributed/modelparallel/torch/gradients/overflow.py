"""Loss scaling over all ranks: a step is skipped everywhere or nowhere.

torch's ``GradScaler`` looks for infinite gradients where it runs, which is one partition. Here the
ranks share what they found, through the one method that all uses of a scaler go through.

Source: smd_model_parallel_pytorch.rst, Context Managers and Util Functions;
model-parallel-customize-training-script-pt.md, Unsupported Framework Features.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.absence.tensors import gradients_hidden
from smdistributed.modelparallel.torch.compat.private.modes import past_recording
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

Found = dict[torch.device, torch.Tensor]


@contextlib.contextmanager
def shared_overflows(runtime: TorchRuntime) -> Iterator[None]:
    """Makes every ``torch.amp.GradScaler`` share its findings, as long as it is entered.

    That concerns scalers of torch's class, and of those derived from it, over a
    ``DistributedOptimizer``, the optimizer that it wraps, and where ranks have parts of a model
    over one that nothing wraps; others stay as they are.
    """
    kind = torch.amp.GradScaler
    unscale, initialize = kind._unscale_grads_, kind._lazy_init_scale_growth_tracker

    def unscale_grads(self: torch.amp.GradScaler, optimizer: Any, *args: Any) -> Found:
        own = [each for each in runtime.live_optimizers() if optimizer in (each, each.optimizer)]
        for each in own:
            each.take_gradients()  # where there are masters, theirs are what is updated
        with gradients_hidden():
            found: Found = unscale(self, optimizer, *args)
        is_shared = bool(own) or _trains_parts(runtime, optimizer)
        return _shared(runtime, found) if is_shared else found

    def lazy_init(self: torch.amp.GradScaler, dev: torch.device) -> None:
        # A step function runs on fakes first; the scale must be a real tensor and no part of it.
        with past_recording():
            initialize(self, dev)

    kind._unscale_grads_ = unscale_grads  # type: ignore[method-assign, assignment]
    kind._lazy_init_scale_growth_tracker = lazy_init  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind._unscale_grads_ = unscale  # type: ignore[method-assign]
        kind._lazy_init_scale_growth_tracker = initialize  # type: ignore[method-assign]


def _trains_parts(runtime: TorchRuntime, optimizer: torch.optim.Optimizer) -> bool:
    return runtime.topology.mp_size > 1 and bool(runtime.models_trained_by(optimizer))


def _shared(runtime: TorchRuntime, found: Found) -> Found:
    """Returns what the ranks found together. Collective: WORLD; in a join, MP_GROUP."""
    flag = torch.zeros((), device=runtime.device)
    for each in found.values():
        flag = torch.maximum(flag, each.to(runtime.device))
    # Replicas without batches do not come here; those with some have the same gradients.
    is_joining = any(model.data_parallel.is_joining for model in runtime.live_models())
    kind = CommGroup.MP_GROUP if is_joining else CommGroup.WORLD
    group = runtime.process_groups.get(kind)
    if group is not None:
        members = runtime.topology.members(kind, runtime.rank)
        with runtime.peers.blaming(members, "looking for infinite gradients with"):
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    # A rank without gradients has a finding too; torch's scaler wants one.
    return {runtime.device: flag}
