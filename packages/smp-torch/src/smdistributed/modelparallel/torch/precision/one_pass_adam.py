"""Adam of large tensors of a GPU in one pass over their memory: clipped, updated and cast.

An update moves all state of a model through a GPU, so it takes as long as that memory takes.
Torch's fused kernel reaches a third of that speed on an H100 (33 ms for 1.4 billion parameters,
1.2 TB/s), and clipping before and casting after it go over memory again. The optimizer of the
script runs as it is, with its groups, its state and its hooks; only what it calls for the work
itself is done here, computed in single precision.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.torch.compat.private.fusion import works_here
from smdistributed.modelparallel.torch.compat.private.optimizers import (
    FUSED_ADAM,
    FUSED_ADAMW,
    has_step_hooks,
)
from smdistributed.modelparallel.torch.compat.private.tensors import multiply_all
from smdistributed.modelparallel.torch.precision.split_master import (
    SplitMaster,
    merged,
    rest_of,
    split,
)

#: Elements of a tensor that is worth a kernel of its own, which saves passes over its memory.
SMALLEST = 1 << 16
#: The same where nothing is clipped and cast: so that the kernel takes longer than its start.
SMALLEST_ALONE = 1 << 23
#: What is computed in single precision.
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Numbers of a tensor's update, as many as keep them aligned.
_NUMBERS = 4

Tensors = Sequence[torch.Tensor]


class OnePassAdam(TorchFunctionMode):
    """Inside, torch's fused kernel of Adam and AdamW is left to small tensors.

    Args:
        copies: what takes the new values of a tensor, in another type, by the tensor's id.
        factor: what gradients are multiplied by; None leaves them. Shape: scalar.
        smallest: elements of a tensor that is large.

    Attributes:
        copied: ids of the tensors whose new values have been copied.
    """

    def __init__(
        self,
        copies: Mapping[int, torch.Tensor],
        factor: torch.Tensor | None,
        smallest: int = SMALLEST,
    ) -> None:
        super().__init__()
        self._copies = copies
        self._factor = factor
        self._smallest = smallest
        self.copied: set[int] = set()

    @staticmethod
    def takes(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
        """Tells whether it can do the work of an optimizer, better than torch's kernel.

        Args:
            optimizer: of the script.
            device: where its tensors are.
        """
        return (
            device.type == "cuda"
            and type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
            and all(_is_plain(group) for group in optimizer.param_groups)
            and not has_step_hooks(optimizer)
            and has_kernel()
        )

    @staticmethod
    def is_worth(source: torch.Tensor) -> bool:
        """Tells whether it updates a parameter and its master in one go."""
        return source.numel() >= SMALLEST and source.is_contiguous()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Takes the place of torch's kernel, unless that is told to leave the update out."""
        options = kwargs or {}
        if func not in (FUSED_ADAM, FUSED_ADAMW) or options.get("found_inf") is not None:
            return func(*args, **options)
        return self._update(func, *args, **options)

    def _update(self, func: Any, *lists: Tensors, **options: Any) -> None:
        """Makes one update.

        Args:
            func: torch's kernel.
            lists: parameters, gradients, first and second moments, their maxima (none), steps.
            options: as torch's.
        """
        parameters, gradients, _, _, _, steps = lists
        chosen = [
            number
            for number, tensors in enumerate(zip(*lists[:4], strict=True))
            if tensors[0].numel() >= self._smallest and _is_flat(tensors)
        ]
        large = frozenset(chosen)
        rest = [number for number in range(len(parameters)) if number not in large]
        if rest:
            if self._factor is not None:
                multiply_all([gradients[number] for number in rest], self._factor)
            func(
                *([each[number] for number in rest] if each else each for each in lists), **options
            )
        if not chosen:
            return
        beta1, beta2 = float(options["beta1"]), float(options["beta2"])
        decay, lr = options["weight_decay"], options["lr"]
        is_decoupled = func is FUSED_ADAMW
        past = torch.stack([steps[number] for number in chosen]).double()
        numbers = past.new_zeros((len(chosen), _NUMBERS))
        numbers[:, 0] = lr / (1 - beta1**past)
        numbers[:, 1] = (1 - beta2**past).rsqrt()
        numbers[:, 2] = 1 - lr * decay if is_decoupled else 1
        numbers[:, 3] = 1 if self._factor is None else self._factor
        for number, row in zip(chosen, numbers.float(), strict=True):
            parameter, gradient, mean, square = (each[number] for each in lists[:4])
            copy = self._copies.get(id(parameter))
            if copy is not None and not copy.is_contiguous():
                copy = None  # a parameter with gaps, whose master has none
            lower = parameter.rest if isinstance(parameter, SplitMaster) else None
            _adam(
                None if lower is not None else parameter.detach().view(-1),
                gradient.detach().view(-1),
                mean.view(-1),
                square.view(-1),
                row,
                None if copy is None else copy.detach().view(-1),
                lower,
                beta1,
                beta2,
                float(options["eps"]),
                0.0 if is_decoupled else float(decay),
            )
            if copy is not None:
                self.copied.add(id(parameter))
                if isinstance(parameter, SplitMaster):
                    split(parameter)


@functools.cache
def has_kernel() -> bool:
    """Whether the kernel runs on the GPU of this process; says in the log why not."""
    return works_here(_update_one, "Adam runs as PyTorch's kernel, since one in Triton does not")


def _update_one() -> None:
    parameter, gradient, mean, square = torch.zeros(4, 16, device="cuda")
    numbers = torch.ones(_NUMBERS, device="cuda")
    _adam(parameter, gradient, mean, square, numbers, None, None, 0.9, 0.999, 1e-8, 0.0)


def _is_plain(group: Mapping[str, Any]) -> bool:
    """Tells whether a parameter group is updated by torch's fused kernel, in the usual way."""
    return bool(group.get("fused")) and not (
        group.get("amsgrad") or group.get("maximize") or group.get("differentiable")
    )


def _is_flat(tensors: Tensors) -> bool:
    return all(each.dtype in _TYPES and each.is_contiguous() for each in tensors)


def _adam(
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
    """Updates a tensor, its state and its copy.

    Args:
        parameter: flat, as the others are; None for one that is ``copy`` and ``rest``.
        gradient: of it.
        mean: first moment.
        square: second moment.
        numbers: size of the step, one by the root of the second correction, what is kept of the
            parameter, and a factor of the gradient.
        copy: takes the new values, if there is one.
        rest: what ``copy`` lacks; see ``split_master``.
        beta1: of the first moment.
        beta2: of the second.
        eps: added to the root of the second.
        decay: of the parameter, added to the gradient.
    """
    if gradient.is_cuda:
        from smdistributed.modelparallel.torch.precision import adam_kernel

        adam_kernel.update(
            parameter, gradient, mean, square, numbers, copy, rest, beta1, beta2, eps, decay
        )
        return
    step_size, root, kept, factor = numbers.unbind()
    if parameter is None:
        assert copy is not None
        assert rest is not None
        old = merged(copy, rest)
    else:
        old = parameter.float()
    slope = gradient.float() * factor + decay * old
    new_mean = mean.float() * beta1 + slope * (1 - beta1)
    new_square = square.float() * beta2 + slope * slope * (1 - beta2)
    new = old * kept - step_size * new_mean / (new_square.sqrt() * root + eps)
    mean.copy_(new_mean)
    square.copy_(new_square)
    if parameter is not None:
        parameter.copy_(new)
    if copy is not None:
        copy.copy_(new)
        if rest is not None:
            rest.copy_(rest_of(copy, new))
