"""The update of Adam as one kernel.

Written by hand, for who updates many tensors has each started by itself: what PyTorch's compiler
makes takes 80 to 145 us of a host to start, since each call looks at its arguments again. It was
slow at times too, for a reason that was not found: on an H200, 36 ms for 3.4 billion parameters in
bf16, beside 15.

To be imported only where Triton is (``one_pass_adam.has_kernel``).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version

#: So that a thread has eight numbers: 16 bytes of half precision.
_BLOCK = 1024
_WARPS = 4


def update(
    parameter: torch.Tensor | None,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    numbers: torch.Tensor,
    copy: torch.Tensor | None,
    rest: torch.Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """Updates flat tensors of one size; see ``one_pass_adam``."""
    count = gradient.numel()
    launch: Any = _update[(triton.cdiv(count, _BLOCK),)]
    with torch.cuda.device(gradient.device):
        launch(
            *(parameter, gradient, mean, square, numbers, copy, rest, count),
            # In double precision, as 1 - 0.999 is not what it seems in single.
            *(beta1, 1 - beta1, beta2, 1 - beta2, eps, decay),
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    for changed in (parameter, mean, square, copy, rest):
        if changed is not None:
            # What autograd has kept of it is not to be used any more.
            increment_version(changed)


@triton.jit  # type: ignore[untyped-decorator]
def _update(  # type: ignore[no-untyped-def]
    parameter,
    gradient,
    mean,
    square,
    numbers,
    copy,
    rest,
    count,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = place < count
    if rest is None:
        old = tl.load(parameter + place, mask=is_there).to(tl.float32)
    else:  # see ``split_master``
        upper = tl.load(copy + place, mask=is_there).to(tl.int16, bitcast=True).to(tl.int32)
        lower = tl.load(rest + place, mask=is_there).to(tl.int32)
        old = ((upper << 16) + lower).to(tl.float32, bitcast=True)
    slope = tl.load(gradient + place, mask=is_there).to(tl.float32)
    old_mean = tl.load(mean + place, mask=is_there).to(tl.float32)
    old_square = tl.load(square + place, mask=is_there).to(tl.float32)
    step_size = tl.load(numbers)
    root = tl.load(numbers + 1)
    kept = tl.load(numbers + 2)
    factor = tl.load(numbers + 3)
    slope = slope * factor + decay * old
    new_mean = old_mean * beta1 + slope * rest1
    new_square = old_square * beta2 + slope * slope * rest2
    new = old * kept - step_size * new_mean / (tl.sqrt_rn(new_square) * root + eps)
    tl.store(mean + place, new_mean, mask=is_there)
    tl.store(square + place, new_square, mask=is_there)
    if rest is None:
        tl.store(parameter + place, new, mask=is_there)
    else:
        rounded = new.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        lower = tl.minimum(new.to(tl.int32, bitcast=True) - (rounded << 16), 32767)
        tl.store(rest + place, lower.to(tl.int16), mask=is_there)
    if copy is not None:
        tl.store(copy + place, new, mask=is_there)
