"""How many floating-point operations one call of an operation takes, or is worth.

On a GPU an operation takes the time that its memory takes, if it is no product; it counts as the
operations that products in half precision make in that time. PyTorch knows formulas for those that
count. A formula may refuse a call that the operation itself accepts: that of PyTorch 2.11 for
attention refuses heads that share keys and values. A count only balances partitions, so a refusal
never ends a step; the call is then counted here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.common.planning.pass_costs import (
    LONGER_IN_SINGLE,
    LONGER_IN_TF32,
    OPERATIONS_A_BYTE,
)
from smdistributed.modelparallel.torch.compat.private.modes import flop_registry
from smdistributed.modelparallel.torch.record.costs.work import makes_tensors
from smdistributed.modelparallel.torch.tensors.nested import tensors_in

logger = logging.getLogger(__name__)

#: How the operations of attention begin whose tensors are (batch, heads, length, width).
_ATTENTION = "aten::_scaled_dot_product_"


class Count(NamedTuple):
    """What one call of an operation takes.

    Attributes:
        flops: floating-point operations, or what it is worth in them.
        moved: of them, what stands for moving memory.
        products: floating-point operations of a product, whatever it computes in.
        moved_bytes: what it reads and writes, if it is no product.
    """

    flops: int
    moved: int
    products: int
    moved_bytes: int


class FlopCounter:
    """Counts calls of operations; says once of each that its formula refused a call."""

    def __init__(self) -> None:
        self._refused: set[Any] = set()

    def count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Count:
        """Returns what a call takes.

        Where PyTorch has no formula, on the host 0, on a GPU what its bytes are worth. Where the
        formula refuses, attention is counted by its shapes, and any other operation as one for each
        byte that it reads or writes.
        """
        is_on_gpu = _is_on_gpu(out)
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            num_bytes = _moved_bytes((args, kwargs, out)) if makes_tensors(func, out) else 0
            moved = OPERATIONS_A_BYTE * num_bytes if is_on_gpu else 0
            return Count(moved, moved, _attention_flops(func, args, kwargs) or 0, num_bytes)
        counted = self._counted(formula, func, args, kwargs, out)
        return Count(counted * _longer(out) if is_on_gpu else counted, 0, counted, 0)

    def _counted(self, formula: Any, func: Any, args: Any, kwargs: Any, out: Any) -> int:
        try:
            return int(formula(*args, **kwargs, out_val=out))
        except Exception as error:
            if func not in self._refused:
                self._refused.add(func)
                logger.debug("%s is counted without PyTorch's formula: %r", func, error)
        counted = _attention_flops(func, args, kwargs)
        return _moved_bytes((args, kwargs, out)) if counted is None else counted


def _is_on_gpu(out: Any) -> bool:
    return any(each.is_cuda for each in tensors_in(out))


def is_half(out: Any) -> bool:
    """Whether a result is in half precision, or in less."""
    return any(each.element_size() < 4 for each in tensors_in(out) if each.is_floating_point())


def _longer(out: Any) -> int:
    """Returns how much longer than in half precision a GPU takes for a product.

    Attention in half precision gives sums in single precision besides its result.
    """
    if is_half(out):
        return 1
    is_exact = torch.get_float32_matmul_precision() == "highest"
    return LONGER_IN_SINGLE if is_exact else LONGER_IN_TF32


def _attention_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Returns what attention takes; None for other operations.

    Shape: query (batch, heads, length, width); keys and values may have fewer heads, each of which
    serves several of the query's.
    """
    if not func._schema.name.startswith(_ATTENTION):
        return None
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    given.update(kwargs)
    try:
        batch, heads, queries, width = given["query"].shape
        keys, value_width = given["value"].shape[-2:]
    except (KeyError, ValueError):
        return None
    # Forward: scores and the weighted sum of values. Backward: scores again, the gradients of
    # scores and values from that of the output, the gradients of queries and keys.
    is_backward = any(name.startswith("grad_out") for name in given)
    widths = 3 * width + 2 * value_width if is_backward else width + value_width
    return int(2 * batch * heads * queries * keys * widths)


def _moved_bytes(obj: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(obj))
