"""The gradients of a residual sum and its norm, in one pass over memory.

Those of weight, shift and bias are sums over all rows, those of a row are sums over its channels.
PyTorch's compiler makes kernels of both orders, which read the same numbers once each: on an H200,
4096 rows of 4096 numbers in bf16 take 94 us, beside products far more. Here a program has whole
rows, one after the other, and keeps what it has of the sums over rows until it ends.

To be imported only where Triton is (``fusion.runs_kernels``).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_PROGRAMS_PER_PROCESSOR = 2
_CHANNELS_PER_WARP = 512
_MOST_WARPS = 16


def gradients(
    total: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    of_total: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradient of what was normed, and parts of those of bias, weight and shift.

    Args:
        total: what was normed, ``(..., channels)``; all tensors are contiguous.
        mean: of each row, ``(...)``, in single precision.
        scale: one by the standard deviation of each row.
        weight: that rows were multiplied by, ``(channels,)``.
        of_total: the gradient of the sum itself, if it has one.
        first: that of its norm.
        second: to be added to it.

    Returns:
        The gradient of the sum, and ``(programs, 3, channels)``, to be summed over programs.
    """
    channels = total.shape[-1]
    rows = total.numel() // channels
    processors = torch.cuda.get_device_properties(total.device).multi_processor_count
    programs = min(rows, processors * _PROGRAMS_PER_PROCESSOR)
    own = torch.empty_like(total)
    parts = total.new_empty((programs, 3, channels), dtype=torch.float32)
    block = triton.next_power_of_2(channels)
    launch: Any = _gradients[(programs,)]
    with torch.cuda.device(total.device):
        launch(
            *(total, mean, scale, weight, of_total, first, second, own, parts),
            *(rows, channels),
            BLOCK=block,
            num_warps=min(_MOST_WARPS, max(1, block // _CHANNELS_PER_WARP)),
        )
    return own, parts


@triton.jit  # type: ignore[untyped-decorator]
def _gradients(  # type: ignore[no-untyped-def]
    total,
    mean,
    scale,
    weight,
    of_total,
    first,
    second,
    own,
    parts,
    rows,
    channels,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    channel = tl.arange(0, BLOCK)
    is_there = channel < channels
    factor = tl.load(weight + channel, mask=is_there, other=0.0).to(tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_shift = tl.zeros((BLOCK,), tl.float32)
    place = program.to(tl.int64) * channels + channel
    stride = programs.to(tl.int64) * channels
    for row in range(program, rows, programs):
        gradient = tl.load(first + place, mask=is_there, other=0.0).to(tl.float32)
        if second is not None:
            gradient += tl.load(second + place, mask=is_there, other=0.0).to(tl.float32)
        number = tl.load(total + place, mask=is_there, other=0.0).to(tl.float32)
        by = tl.load(scale + row)
        normal = tl.where(is_there, (number - tl.load(mean + row)) * by, 0.0)
        of_normal = gradient * factor
        level = tl.sum(of_normal, 0) / channels
        slope = tl.sum(of_normal * normal, 0) / channels
        made = (of_normal - level - normal * slope) * by
        if of_total is not None:
            made += tl.load(of_total + place, mask=is_there, other=0.0).to(tl.float32)
        tl.store(own + place, made, mask=is_there)
        of_bias += tl.where(is_there, made, 0.0)
        of_weight += gradient * normal
        of_shift += gradient
        place += stride
    start = parts + program.to(tl.int64) * 3 * channels + channel
    tl.store(start, of_bias, mask=is_there)
    tl.store(start + channels, of_weight, mask=is_there)
    tl.store(start + 2 * channels, of_shift, mask=is_there)
