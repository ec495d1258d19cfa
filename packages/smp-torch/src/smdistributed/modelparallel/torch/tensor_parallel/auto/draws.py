"""Dropout of tensors whose channels or heads lie on several ranks.

The mask of the whole tensor is drawn on every rank, from the same random numbers, and cut: each
rank drops what one process would drop. From what every rank has whole each drops the same; outside
of steps, where ranks draw from generators of their own, a call has a seed of its rank for that.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.tensor_parallel.auto.adapting import Adapting
from smdistributed.modelparallel.torch.tensor_parallel.auto.statistics import (
    Reduction,
    reduction_of,
)
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup

_DROPOUTS = frozenset({F.dropout, torch.dropout})
_ATTENTION = F.scaled_dot_product_attention
_ATTENTION_ARGUMENTS = inspect.Signature(
    [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in (
            *(("query", None), ("key", None), ("value", None), ("attn_mask", None)),
            *(("dropout_p", 0.0), ("is_causal", False), ("scale", None), ("enable_gqa", False)),
        )
    ]
)


#: Torch's attention, in which others are called past all modes.
_WHOLE_ATTENTION = F.multi_head_attention_forward
_WHOLE_ARGUMENTS = inspect.signature(_WHOLE_ATTENTION)


class NotedDraws(TorchFunctionMode):
    """Notes the shape of all that would be dropped from, and drops nothing.

    Args:
        adapting: of calls to slices; None: nothing is in slices.

    Attributes:
        shapes: in the order of the calls.
        reductions: what reduces, where nothing is in slices.
    """

    def __init__(self, adapting: Adapting | None = None) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.reductions: list[Reduction] = []
        self._adapting = adapting

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._adapting is not None:
            func, args, kwargs = self._adapting.adapted(func, args, kwargs)
        elif (reduction := reduction_of(func, args, kwargs)) is not None:
            self.reductions.append(reduction)
        if func in _DROPOUTS:
            tensor = args[0] if args else kwargs["input"]
            self.shapes.append(tuple(tensor.shape))
            return tensor
        if func is _ATTENTION:
            given = _given(args, kwargs)
            if not all(given[each].numel() for each in ("query", "key", "value")):
                # Kernels divide by how many heads there are, which would end the process.
                raise ValueError("attention is given an empty query, key or value")
            self.shapes.append(_scores_shape(given))
            return func(**{**given, "dropout_p": 0.0})
        if func is _WHOLE_ATTENTION:
            bound = _WHOLE_ARGUMENTS.bind(*args, **kwargs)
            self.shapes.append(_whole_scores_shape(**bound.arguments))
            return func(**{**bound.arguments, "dropout_p": 0.0})
        return func(*args, **kwargs)


def seeds_of_calls(group: TensorGroup, draws: Sequence[Sequence[int | None]]) -> list[int | None]:
    """Returns the seeds of all ranks' calls, where they drop from what every rank has whole.

    Collective: TP_GROUP, outside of steps.

    Args:
        group: the ranks.
        draws: of each call, what of each dropout is split; see ``SplitDraws``.

    Returns:
        one for each rank; None where its call has no need of it.
    """
    is_keyed = group.random is not None and group.random.is_active
    if is_keyed or not any(dim is None for dims in draws for dim in dims):
        return [None] * group.size
    own = int(torch.randint(2**31, (), device="cpu"))
    found: list[int | None] = [each[0] for each in group.everyones([own])]
    return found


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Inside, random numbers are those that follow a seed; None: those that come next."""
    if seed is None:
        yield
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


class SplitDraws(TorchFunctionMode):
    """Draws for whole tensors, of which a rank has slices.

    Args:
        dims: along which the tensor of each dropout is split, in the order of the calls; None: it
            is whole.
        size: how many ranks there are.
        rank: which of them this is.
        adapting: of other calls to slices; None: there is no need of it.
    """

    def __init__(
        self, dims: Sequence[int | None], size: int, rank: int, adapting: Adapting | None = None
    ) -> None:
        super().__init__()
        self._dims = dims
        self._size, self._rank = size, rank
        self._number = 0
        self._adapting = adapting

    def copy(self) -> SplitDraws:
        """Returns one that goes on from where this one is."""
        adapting = self._adapting and self._adapting.copy()
        other = SplitDraws(self._dims, self._size, self._rank, adapting)
        other._number = self._number
        return other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._adapting is not None:
            func, args, kwargs = self._adapting.adapted(func, args, kwargs)
        if func in _DROPOUTS:
            return self._dropout(self._next(), func, *args, **kwargs)
        if func is _ATTENTION:
            dim, given = self._next(), _given(args, kwargs)
            if dim is None or not given["dropout_p"]:
                return func(*args, **kwargs)
            return self._attention(dim, **given)
        if func is _WHOLE_ATTENTION:
            self._next()  # every rank has it whole, as its weights are
        return func(*args, **kwargs)

    def _next(self) -> int | None:
        if self._number == len(self._dims):
            raise SMPError(
                "a module that is split draws more often than when its slices were proven; exclude "
                "it: smp.set_tensor_parallelism(module, enabled=False)."
            )
        self._number += 1
        return self._dims[self._number - 1]

    def _dropout(
        self,
        dim: int | None,
        function: Any,
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Any:
        if not training or not p:
            return input
        if dim is None:
            return function(input, p, training, *[inplace] * inplace)
        mask = self._mask(dim, input, p)
        return input.mul_(mask) if inplace else input * mask

    def _mask(self, dim: int, tensor: torch.Tensor, p: float) -> torch.Tensor:
        """Returns the own slice of the whole tensor's mask, which follows its order in memory."""
        order = in_memory(tensor)
        shape = list(tensor.shape)
        shape[dim] *= self._size
        like = {"dtype": tensor.dtype, "device": tensor.device}
        ones = torch.ones([shape[each] for each in order], **like)  # type: ignore[call-overload]
        places = [order.index(each) for each in range(tensor.dim())]
        whole = F.dropout(ones, p).permute(places)
        return whole.narrow(dim, self._rank * tensor.shape[dim], tensor.shape[dim])

    def _attention(
        self,
        dim: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        """Attends as torch's own function says, with its probabilities where they can be cut."""
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = (each.repeat_interleave(repeats, -3) for each in (key, value))
        scores = query @ key.transpose(-2, -1)
        scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        probabilities = scores.softmax(-1)
        return (probabilities * self._mask(dim, probabilities, dropout_p)) @ value


def in_memory(tensor: torch.Tensor) -> list[int]:
    """Returns the dims of a tensor by how far apart their elements lie in memory."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _given(args: Any, kwargs: Any) -> dict[str, Any]:
    bound = _ATTENTION_ARGUMENTS.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _whole_scores_shape(
    query: torch.Tensor,
    key: torch.Tensor,
    num_heads: int,
    bias_k: torch.Tensor | None,
    add_zero_attn: bool,
    **_: Any,
) -> tuple[int, ...]:
    length, examples = query.shape[0], 1 if query.dim() == 2 else query.shape[1]
    keys = key.shape[0] + (bias_k is not None) + add_zero_attn
    return examples, num_heads, length, keys


def _scores_shape(given: dict[str, Any]) -> tuple[int, ...]:
    query, key = given["query"], given["key"]
    return (*query.shape[:-1], key.shape[-2])
