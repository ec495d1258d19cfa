"""Experts that the ranks of a group have between them: tokens travel, weights do not.

Each rank brings its own tokens, and has an equal share of the experts of every stack. Tokens go to
the ranks that have their experts, all to all; these call the stack as it is written on what they
received, and the results go back. With a prescaled batch all ranks have the same tokens: each
computes what its experts have to do with them, and the results are summed.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.between import no_call
from smdistributed.modelparallel.torch.compat.private.compiled import run_as_written
from smdistributed.modelparallel.torch.tensor_parallel.exchange import (
    enter,
    leave,
    moved,
    rows_moved,
)
from smdistributed.modelparallel.torch.tensor_parallel.experts.routed import Routed, routed
from smdistributed.modelparallel.torch.tensor_parallel.experts.rows import (
    Dispatch,
    computed,
    dispatched,
)
from smdistributed.modelparallel.torch.tensor_parallel.experts.stack import Stack, standing_in
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule, Slice

#: Attributes that a spread stack has besides its own.
TAKEN = ("_slices", "place", "translations", "_smp_stack")
_EXCLUDE = "Exclude it: smp.set_tensor_parallelism(module, enabled=False)."


class SpreadExperts(DistributedModule):
    """The part of the class of a spread stack that has its forward run on own experts.

    Forward and backward are collective: TP_GROUP.
    """

    _smp_stack: Stack

    @run_as_written
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gives tokens what their experts make of them. Collective: TP_GROUP.

        Shape: tokens (..., width) to (..., width).

        Raises:
            SMPError: the ranks call different modules, or in different ways.
            UnsupportedError: it is not called with tokens, experts and weights; or with an expert
                that there is not.
        """
        call = routed(args, kwargs)
        if call is None:
            raise UnsupportedError(
                f"{self.place} is spread over ranks, and is called with tokens (T, width), the "
                "experts of each (T, choices) and their weights (T, choices); it was called with "
                f"something else. {_EXCLUDE}"
            )
        group, stack = self.tensor_group, self._smp_stack
        own = [self._parameters[name] for name in stack.parameters]
        if group.makes_shapes(call.tokens):
            made: torch.Tensor = _Shaped.apply(call.tokens, call.weights, *own)  # type: ignore[no-untyped-call]
            return made
        is_needed = self._agreed(call)
        tokens, weights = (
            each if each.requires_grad or not needed else each.detach().requires_grad_()
            for each, needed in zip((call.tokens, call.weights), is_needed, strict=True)
        )
        with standing_in(self, {name: self.use_slice(name) for name in stack.parameters}):
            flat = tokens.reshape(call.count, tokens.shape[-1])
            result = self._result(call, flat, weights.reshape(-1))
        return result.view(*call.tokens.shape[:-1], result.shape[-1])

    @no_call
    def _agreed(self, call: Routed) -> tuple[bool, bool]:
        """Returns whether tokens and weights of any rank need gradients. Collective: TP_GROUP."""
        group, enabled = self.tensor_group, torch.is_grad_enabled()
        kind = f"{self.place} on {call.tokens.dtype} of width {call.tokens.shape[-1]}, {enabled}"
        if group.is_prescaled:
            kind += f", {call.count} tokens"
        own = [enabled and each.requires_grad for each in (call.tokens, call.weights)]
        everyones = group.call(self.place, [zlib.crc32(kind.encode()), *map(int, own)])
        if len({each[0] for each in everyones}) > 1:
            group.refuse("must call the same distributed modules in the same way", kind)
        return any(each[1] for each in everyones), any(each[2] for each in everyones)

    def _result(self, call: Routed, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        group = self.tensor_group
        dispatch = dispatched(call.index, self._smp_stack.number, group.size)
        if group.is_prescaled:
            dispatch = dispatch.of(group.rank)
            tokens, weights = enter(group, tokens, []), enter(group, weights, [])
        rows = tokens.index_select(0, dispatch.tokens)
        chosen = weights.index_select(0, dispatch.choices)
        made = (self._of_own if group.is_prescaled else self._of_all)(call, dispatch, rows, chosen)
        result = made.new_zeros((len(tokens), made.shape[-1])).index_add(0, dispatch.tokens, made)
        return leave(group, result, []) if group.is_prescaled else result

    def _of_own(
        self, call: Routed, dispatch: Dispatch, rows: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns what the own experts make of own rows."""
        self._check_exist(dispatch.least, dispatch.most)
        return computed(call, rows, dispatch.rows, dispatch.experts, weights, self._called)

    def _of_all(
        self, call: Routed, dispatch: Dispatch, rows: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns what the experts of all ranks make of own rows. Collective: TP_GROUP."""
        group = self.tensor_group
        size, rank = group.size, group.rank
        everyones = group.everyones(
            [*dispatch.num_rows, *dispatch.num_choices, dispatch.least, dispatch.most]
        )
        self._check_exist(min(each[-2] for each in everyones), max(each[-1] for each in everyones))
        of_rows = dispatch.num_rows, [each[rank] for each in everyones]
        of_choices = dispatch.num_choices, [each[size + rank] for each in everyones]
        places = torch.stack([dispatch.rows, dispatch.experts], 1)
        row_of, experts = rows_moved(group.collectives, places, *of_choices).unbind(1)
        counts = torch.tensor([of_rows[1], of_choices[1]], device=row_of.device)
        starts = counts[0].cumsum(0) - counts[0]
        row_of = row_of + starts.repeat_interleave(counts[1], output_size=len(row_of))
        theirs, chosen = moved(group, [rows, weights], [of_rows, of_choices])
        made = computed(call, theirs, row_of, experts, chosen, self._called)
        return moved(group, [made], [of_rows[::-1]])[0]

    def _called(self, arguments: Any) -> torch.Tensor:
        args, kwargs = arguments
        found: torch.Tensor = super().forward(*args, **kwargs)
        return found

    def _check_exist(self, least: int, most: int) -> None:
        """Checks that there are all experts that tokens of any rank go to.

        Raises:
            UnsupportedError: there are not.
        """
        number = self._smp_stack.number
        if least < 0 or most >= number:
            raise UnsupportedError(
                f"{self.place} is spread over ranks and has experts 0 to {number - 1}; received "
                f"experts {least} to {most}. {_EXCLUDE}"
            )


def spread(module: nn.Module, stack: Stack) -> None:
    """Makes a stack of experts one that the ranks of its group have between them.

    Its parameters are to be put in afterwards: slices along dim 0.
    """
    kind: Any = type(module)
    shapes = {name: tuple(module.get_parameter(name).shape) for name in stack.parameters}
    size = DistributedModule._group.size
    module.__class__ = _spread(kind)
    slices = {name: Slice(shape, 0, nn.init.zeros_, None, 0) for name, shape in shapes.items()}
    vars(module).update(
        _slices=slices, place=type(module).__name__, translations=None, _smp_stack=stack
    )
    for name in stack.counts:
        setattr(module, name, stack.number // size)


@functools.cache
def _spread(kind: Any) -> Any:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (SpreadExperts, kind), names)


class _Shaped(torch.autograd.Function):
    """What stands for a result where only shapes are asked for."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weights: torch.Tensor, *own: torch.Tensor) -> Any:
        ctx.save_for_backward(tokens, weights, *own)
        return torch.empty_like(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(map(torch.zeros_like, ctx.saved_tensors))
