"""An update that looks at more than a rank has, on whole parameters.

Without a pipeline all that ranks have in parts, as shards or slices, comes together once for an
update; in a pipeline it is made as the script's own code runs between steps, with tensors that
stand for whole ones and for those of other partitions. Each rank computes all of the update, and
what the optimizer keeps is whole on each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.parts.together import Together
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.tensors.nested import tensors_in


def update_wholes(
    runtime: TorchRuntime, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None
) -> Any:
    """Makes one update. Collective: the ranks that have parts of the parameters.

    Args:
        runtime: the state of the library in this process.
        optimizer: of the script.
        closure: computes gradients, and sees parameters as code between steps does.
    """
    bound_gradients(runtime, optimizer)
    is_alone = runtime.topology.pp_size == 1
    together = Together(
        _parameters(optimizer) if is_alone else (),
        kept=lambda: tensors_in(list(optimizer.state.values())) if is_alone else (),
    )

    def apart(closure: Callable[[], Any]) -> Any:
        with together.apart():
            loss = closure()
            bound_gradients(runtime, optimizer)
        return loss

    with together:
        if closure is None:
            return optimizer.step()
        return optimizer.step(functools.wraps(closure)(functools.partial(apart, closure)))


def bound_gradients(runtime: TorchRuntime, optimizer: torch.optim.Optimizer) -> None:
    """Scales gradients as ``sdp_gradient_clipping`` says, before an update by them. Collective."""
    bound = runtime.config.sdp_gradient_clipping
    if runtime.sharding_groups is not None and bound < float("inf"):
        nn.utils.clip_grad_norm_(_parameters(optimizer), bound)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]
