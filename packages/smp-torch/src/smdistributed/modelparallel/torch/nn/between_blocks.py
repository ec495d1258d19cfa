"""What lies between the products of two blocks, as one function of their exchanges.

The shares of a block are summed over the ranks, bias and residual are added, and the norm of that
is gathered for the next block. As one function, neither the sum nor the gradient of what was
gathered is written to memory: what reads the shares of the ranks adds them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.torch.collectives.interface import Sizes
from smdistributed.modelparallel.torch.collectives.sums import fused_sum
from smdistributed.modelparallel.torch.compat.fused import fused
from smdistributed.modelparallel.torch.compat.private.fusion import runs_kernels
from smdistributed.modelparallel.torch.nn.fused import residual_norm, residual_norm_gradients
from smdistributed.modelparallel.torch.tensor_parallel.group import Handle, TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.once import once_differentiable

#: Of what ``norm_kernel`` takes: what is read, and the most channels of a row.
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_CHANNELS = 8192


class Crossed(NamedTuple):
    """What has become of own examples behind a block.

    Attributes:
        total: the residual sum.
        normed: its norm.
        everyones: the norms of the examples of all ranks, if they were to be gathered.
    """

    total: torch.Tensor
    normed: torch.Tensor
    everyones: torch.Tensor | None


def crossed(
    group: TensorGroup,
    share: torch.Tensor,
    sizes: Sizes,
    bias: torch.Tensor,
    hidden: torch.Tensor,
    norm: nn.LayerNorm,
    *,
    gathers: bool,
) -> Crossed:
    """Sums the shares of a block, adds bias and residual, norms, and gathers.

    Collective: TP_GROUP, of several ranks that have different examples.

    Args:
        group: the ranks.
        share: of the examples of all, ``(sum(sizes), ..., channels)``.
        sizes: the examples of each rank.
        bias: of the block.
        hidden: own examples, as the block got them.
        norm: of the residual sum, with weight and bias.
        gathers: whether the next block reads the norm.
    """
    total, normed, *rest = _Crossed.apply(  # type: ignore[no-untyped-call]
        share, hidden, bias, norm.weight, norm.bias, norm.eps, group.handle, sizes, gathers
    )
    group.exchanged(total)
    return Crossed(total, normed, rest[0] if gathers else None)


class _Crossed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        share: torch.Tensor,
        hidden: torch.Tensor,
        bias: torch.Tensor,
        weight: torch.Tensor,
        shift: torch.Tensor,
        epsilon: float,
        handle: Handle,
        sizes: Sizes,
        gathers: bool,
    ) -> Any:
        collectives = handle().collectives
        parts = collectives.scatter_parts(share, sizes)
        # As torch's function does.
        dtype = torch.float32 if torch.is_autocast_enabled(share.device.type) else None
        total, normed, mean, scale = residual_norm(
            hidden, bias, weight, shift, epsilon, dtype, *parts
        )
        ctx.save_for_backward(total, mean, scale, weight)
        ctx.collectives, ctx.sizes = collectives, sizes
        ctx.dtypes = [each.dtype for each in (share, hidden, bias, weight, shift)]
        ctx.set_materialize_grads(False)
        if not gathers:
            return total, normed
        return total, normed, collectives.gather(normed, sizes)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        of_total: torch.Tensor | None,
        of_normed: torch.Tensor | None,
        of_everyones: torch.Tensor | None = None,
    ) -> Any:
        parts = [] if of_normed is None else [of_normed]
        if of_everyones is not None:
            parts += ctx.collectives.scatter_parts(of_everyones, ctx.sizes)
        total, mean, scale, weight = ctx.saved_tensors
        own, *of_parameters = _gradients(total, mean, scale, weight, of_total, parts)
        of_share = ctx.collectives.gather(own.to(ctx.dtypes[0]), ctx.sizes)
        made = (own, *of_parameters)
        rest = (each.to(dtype) for each, dtype in zip(made, ctx.dtypes[1:], strict=True))
        return of_share, *rest, None, None, None, None


def _gradients(
    total: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    of_total: torch.Tensor | None,
    parts: list[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Returns what ``residual_norm_gradients`` does, by a kernel where there is one."""
    parts = parts or [torch.zeros_like(total)]
    read = [each for each in (total, weight, of_total, *parts) if each is not None]
    has_kernel = (
        all(each.dtype in _TYPES for each in read)
        and total.numel() > 0
        and total.shape[-1] <= _MOST_CHANNELS
        and runs_kernels(total)
    )
    if not has_kernel:
        return residual_norm_gradients(total, mean, scale, weight, of_total, *parts)
    from smdistributed.modelparallel.torch.nn import norm_kernel

    if len(parts) > 2:
        parts = [parts[0], fused_sum(*parts[1:])]
    whole = None if of_total is None else of_total.contiguous()
    of_normed = [each.contiguous() for each in parts]
    own, of_rows = norm_kernel.gradients(
        total.contiguous(), mean.contiguous(), scale.contiguous(), weight, whole, *of_normed
    )
    return own, *_sums_of_programs(of_rows, weight.dtype)


@fused
def _sums_of_programs(parts: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(parts[:, place].sum(0).to(dtype) for place in range(3))
