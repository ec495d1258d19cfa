"""Which linear maps and attentions of a module read its arguments, and which each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import tensors_in
from smdistributed.modelparallel.torch.tensor_parallel.auto.maps import (
    is_attention,
    is_map,
    sizes_of,
)

Names = frozenset[str]
Sizes = tuple[int, ...]


class Origins(TorchFunctionMode):
    """Follows, in one call of a module, what tensors were computed from: the last linear maps.

    An attention of torch counts as one. A guess, which a proof follows: what views share memory
    is not followed.

    Args:
        module: that is called.

    Attributes:
        read_by: of each linear map that was called, the maps whose results lead to its input.
        cuts: of those whose result was cut in two or more along its channels, the sizes of parts.
        folds: of those whose channels were seen as several dims, the first of these, as sizes.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.read_by: dict[str, Names] = {}
        self.cuts: dict[str, Sizes] = {}
        self.folds: dict[str, Sizes] = {}
        self._of: dict[int, Names] = {}
        self._channels: dict[int, tuple[str, int]] = {}  # whose result it is, and how many
        self._starts: dict[str, set[int]] = {}
        self._kept: list[torch.Tensor] = []  # ids stay theirs
        for name, each in module.named_modules():
            if is_map(each) or is_attention(each):
                self._watch(name, each)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        origins: Names = frozenset().union(*map(self.of, given))
        # What returns nothing writes to its first tensor.
        made = given[:1] if result is None else tensors_in(result)
        for each in made:
            self._note(each, origins)
        followed = [each for each in given if id(each) in self._channels]
        if len(followed) == 1 and result is not None:
            self._follow(followed[0], made)
        return result

    def of(self, tensor: torch.Tensor) -> Names:
        """Returns the maps whose results lead to a tensor."""
        return self._of.get(id(tensor), frozenset())

    def _note(self, tensor: torch.Tensor, origins: Names) -> None:
        self._of[id(tensor)] = origins
        self._kept.append(tensor)

    def _watch(self, name: str, linear: nn.Module) -> None:
        def called(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            given = tensors_in((args, kwargs))
            read: Names = frozenset().union(*map(self.of, given))
            self.read_by[name] = self.read_by.get(name, frozenset()) | read
            for each in tensors_in(result):
                self._note(each, frozenset({name}))
            if is_map(linear):
                self._channels[id(result)] = name, sizes_of(linear)[1]

        linear.register_forward_hook(called, with_kwargs=True)

    def _follow(self, tensor: torch.Tensor, made: Sequence[torch.Tensor]) -> None:
        """Notes how the channels of a map's result are taken apart."""
        name, number = self._channels[id(tensor)]
        if len(made) > 1:
            lengths = tuple(each.shape[-1] for each in made if each.dim())
            if sum(lengths) == number:
                self.cuts[name] = lengths
            return
        for each in made:
            self._follow_one(name, number, tensor, each)

    def _follow_one(self, name: str, number: int, tensor: torch.Tensor, made: torch.Tensor) -> None:
        shape = made.shape
        if not shape or not tensor.dim():
            return
        if number in shape and made.numel() == tensor.numel():
            self._channels[id(made)] = name, number
        elif made.numel() == tensor.numel():
            first = [n for n in range(len(shape)) if math.prod(shape[n:]) == number]
            parts = shape[first[0]] if first else 1
            if parts > 1:
                self.folds.setdefault(name, (number // parts,) * parts)
        elif made.dim() == tensor.dim() and shape[:-1] == tensor.shape[:-1]:
            self._cut_out(name, number, tensor, made)

    def _cut_out(self, name: str, number: int, tensor: torch.Tensor, made: torch.Tensor) -> None:
        """Notes an interval of channels that was taken by an index."""
        is_view = made.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        if not is_view or tensor.shape[-1] != number or tensor.stride(-1) != 1:
            return
        start = int(made.storage_offset()) - int(tensor.storage_offset())
        ends = self._starts.setdefault(name, {0, number})
        ends |= {start, start + made.shape[-1]}
        places = sorted(ends)
        if places[-1] == number:
            self.cuts[name] = tuple(b - a for a, b in itertools.pairwise(places))
