"""Means, sums and norms over channels or heads that lie on several ranks.

Code between linear maps may norm all channels of queries together, or what comes before the last
map. Where the whole reduces as many times as many numbers as slices do, these sum what they have,
which is small. A proof notes which calls do, in the order of all that reduce; a call that comes in
another way is refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.tensors.functions import methods_of_tensors

AddUp = Callable[[torch.Tensor], torch.Tensor]


class Reduction(NamedTuple):
    """A call that reduces: its function, and how many numbers to one.

    Attributes:
        function: its name.
        number: of numbers; of what spans the ranks, those of a slice.
        spans: the numbers of all ranks are reduced together.
    """

    function: str
    number: int
    spans: bool = False


@dataclass
class Statistics:
    """Has calls of one call of a split module reduce the numbers of all ranks.

    Args:
        size: how many ranks there are.
        rank: which of them this is.
        add_up: returns the sum over the ranks.
        whole: how many numbers each reduces where nothing is in slices; of a proof.
        known: what a proof has found; None: this is a proof.

    Attributes:
        found: the reductions up to now.
    """

    size: int
    rank: int
    add_up: AddUp
    whole: Sequence[Reduction] = ()
    known: Sequence[Reduction] | None = None
    found: list[Reduction] = field(default_factory=list)

    def copy(self) -> Statistics:
        """Returns one that goes on from where this one is."""
        return Statistics(
            *(self.size, self.rank, self.add_up, self.whole, self.known), list(self.found)
        )

    def spanning(self, function: Any, args: Any, kwargs: Any) -> Callable[..., Any] | None:
        """Returns what is to be called in place of a function; None: that itself.

        Raises:
            SMPError: it comes in another way than when slices were proven.
        """
        reduction = reduction_of(function, args, kwargs)
        if reduction is None:
            return None
        place = len(self.found)
        if self.known is None:
            of_whole = self.whole[place : place + 1]
            wanted = reduction._replace(number=reduction.number * self.size)
            found = reduction._replace(spans=bool(of_whole) and of_whole[0] == wanted)
        else:
            found = self._known(place, reduction)
        self.found.append(found)
        if not found.spans:
            return None
        return functools.partial(_IN_PLACE_OF[function], self)

    def _known(self, place: int, reduction: Reduction) -> Reduction:
        known = self.known[place] if self.known and place < len(self.known) else None
        is_like = known is not None and known.function == reduction.function
        if known is None or not is_like or (known.spans and known.number != reduction.number):
            raise SMPError(
                "a module that is split reduces in another way than when its slices were proven "
                f"({reduction.function} of {reduction.number} numbers); exclude it: "
                "smp.set_tensor_parallelism(module, enabled=False)."
            )
        return known

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """Returns what all ranks have of a number each, side by side along a new first dim."""
        zeros = torch.zeros_like(own)
        return self.add_up(
            torch.stack([own if n == self.rank else zeros for n in range(self.size)])
        )

    def own_part(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the part of a vector that belongs to the own channels."""
        own = whole.shape[0] // self.size
        return whole.narrow(0, self.rank * own, own)


def reduction_of(function: Any, args: Any, kwargs: Any) -> Reduction | None:
    """Returns how a call reduces; None if it does not."""
    if function not in _IN_PLACE_OF:
        return None
    tensor = args[0] if args else kwargs.get("input")
    if not isinstance(tensor, torch.Tensor):
        return None
    dims = _dims_of(function, tensor, args, kwargs)
    number = math.prod(tensor.shape[dim] for dim in dims)
    return Reduction(str(function.__name__), number)


def _dims_of(function: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> list[int]:
    if function in _OF_LAST:
        shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        return list(range(-len(shape), 0))
    given = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = [given] if isinstance(given, int) else given
    is_listed = isinstance(dims, tuple | list) and all(type(each) is int for each in dims)
    return list(dims) if dims and is_listed else list(range(tensor.dim()))


def _sum(across: Statistics, *args: Any, **kwargs: Any) -> torch.Tensor:
    return across.add_up(torch.sum(*args, **kwargs))


def _mean(across: Statistics, *args: Any, **kwargs: Any) -> torch.Tensor:
    return across.add_up(torch.mean(*args, **kwargs)) / across.size


def _moments(
    across: Statistics, x: torch.Tensor, dims: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and variance over some dims and all ranks; the dims stay, of one number.

    Each rank has those of its own numbers, from which those of all follow without a loss.
    """
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    variances, means = across.gathered(torch.stack([variance, mean])).unbind(1)
    total = means.mean(0)
    return total, variances.mean(0) + (means - total).square().mean(0)


def _layer_norm(
    across: Statistics,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    mean, variance = _moments(across, wide, list(range(-len(normalized_shape), 0)))
    made = (wide - mean) * torch.rsqrt(variance + eps)
    if weight is not None:
        made = made * across.own_part(weight)
    if bias is not None:
        made = made + across.own_part(bias)
    return made.to(input.dtype)


def _rms_norm(
    across: Statistics,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    dims = list(range(-len(normalized_shape), 0))
    square = _mean(across, wide.square(), dims, keepdim=True)
    made = wide * torch.rsqrt(square + (torch.finfo(wide.dtype).eps if eps is None else eps))
    if weight is not None:
        made = made * across.own_part(weight)
    return made.to(input.dtype)


_OF_LAST: dict[Any, Callable[..., torch.Tensor]] = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
}
#: What is called in place of functions, which are given the numbers of slices.
_IN_PLACE_OF: dict[Any, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(methods_of_tensors("sum", torch.sum), _sum),
    **dict.fromkeys(methods_of_tensors("mean", torch.mean), _mean),
    **_OF_LAST,
}
