"""Layers one after the other, with two slices of the batch in lockstep where that saves time.

While one slice computes, what lies between the blocks of the other runs on the stream of exchanges:
the sum over the ranks, bias, residual sum and norm, and the gathering for the next block. Autograd
repeats streams and order in the backward pass. On a CPU the order is the same.

Layers run so if each rank of the group can and has two examples, and otherwise as they are written:
what hooks, subclasses, checkpointed layers or compiled code make of them is not looked into. The
results are those of whole batches, to rounding; what is dropped is dropped from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.collectives.interface import Sizes
from smdistributed.modelparallel.torch.compat.private.layers import all_modules_are_hooked
from smdistributed.modelparallel.torch.nn.attention import DistributedAttentionLayer
from smdistributed.modelparallel.torch.nn.blocks import Block
from smdistributed.modelparallel.torch.nn.dropout import AttentionDropout, SlicedDropout
from smdistributed.modelparallel.torch.nn.fused_layer_norm import FusedLayerNorm
from smdistributed.modelparallel.torch.nn.layer import DistributedTransformerLayer, four_dims
from smdistributed.modelparallel.torch.nn.output import DistributedTransformerOutputLayer
from smdistributed.modelparallel.torch.nn.parts import Projection
from smdistributed.modelparallel.torch.tensor_parallel.additions import HOOKS
from smdistributed.modelparallel.torch.tensor_parallel.gathered_linear import (
    Entered,
    Together,
    entered,
)
from smdistributed.modelparallel.torch.tensor_parallel.group import Lanes, TensorGroup

_SLICES = 2
#: Of which a layer consists, if nobody has changed it.
_KNOWN = frozenset(
    {
        AttentionDropout,
        DistributedAttentionLayer,
        DistributedTransformerLayer,
        DistributedTransformerOutputLayer,
        FusedLayerNorm,
        Projection,
        nn.Dropout,
        nn.LayerNorm,
    }
)


class LayersInTurn(nn.Sequential):
    """The layers of a ``DistributedTransformer``.

    Shape: takes and returns the tuple of ``DistributedTransformerLayer``.
    """

    def can_slice(self) -> bool:
        """Whether this rank can run all of them in slices, if the others can."""
        if torch.compiler.is_compiling() or all_modules_are_hooked():
            return False
        return all(map(_is_plain_layer, self))

    def forward(self, input: Any) -> Any:
        """Applies the layers in order. Collective: TP_GROUP."""
        return self._run(list(self), input, [])

    def states(self, input: Any) -> list[torch.Tensor]:
        """Applies the layers in order, and returns what each of them gives. Collective: TP_GROUP.

        They run as they are written, whole batches.
        """
        found = []
        for layer in self:
            input = layer(input)
            found.append(input[0])
        return found

    def in_turn(self, layers: Sequence[nn.Module]) -> Callable[[Any], Any]:
        """Returns what applies some of the layers, that follow each other.

        If it is called again, as checkpointed calls are, it computes as in its first call.
        """
        decided: list[bool] = []
        return lambda input: self._run(layers, input, decided)

    def _run(self, layers: Sequence[nn.Module], input: Any, decided: list[bool]) -> Any:
        first = layers[0]
        if not _is_plain(input) or not isinstance(first, DistributedTransformerLayer):
            return _one_by_one(layers, input)
        hidden, mask = input
        group = first.tensor_group
        if group.size == 1 or group.is_prescaled or group.makes_shapes(hidden):
            return _one_by_one(layers, input)
        with group.examples(first.place, hidden, [four_dims(mask)], can_slice=self.can_slice()) as (
            sizes,
            (common,),
        ):
            if not decided:
                # All ranks have to come to the same answer.
                decided.append(group.all_can_slice and min(sizes) >= _SLICES)
            if not decided[0]:
                return _one_by_one(layers, (hidden, common))[0], mask
            with group.stream.beside():
                return _Lockstep(group, hidden, common, sizes, first.attention).run(layers), mask


def _one_by_one(layers: Sequence[nn.Module], input: Any) -> Any:
    for layer in layers:
        input = layer(input)
    return input


def _is_plain(input: Any) -> bool:
    """Whether an input is one of layers without cross-attention."""
    is_pair = isinstance(input, tuple | list) and len(input) == 2
    return is_pair and isinstance(input[0], torch.Tensor) and input[0].dim() > 0


def _is_plain_layer(layer: nn.Module) -> bool:
    """Whether nothing but a layer as it is written is to run."""
    return (
        isinstance(layer, DistributedTransformerLayer)
        and layer.tensor_group.size > 1
        and not layer.add_cross_attention
        and layer.options.parallel_residual is None
        and not layer.attention.attention_dropout.is_active
        and all(_is_as_written(each, layer.tensor_group.random) for each in layer.modules())
    )


def _is_as_written(module: nn.Module, random: Lanes | None) -> bool:
    state = vars(module)
    if type(module) not in _KNOWN or "forward" in state or state.get("_compiled_call_impl"):
        return False
    hooks = [hook for name in HOOKS for hook in state[name].values()]
    return all(random is not None and random.owns_hook(hook) for hook in hooks)


class _Slice:
    """Some of the own examples, on their way through the layers.

    Args:
        hidden: the examples.
        mask: of these of all ranks, for the own heads.
        sizes: how many each rank has.
    """

    def __init__(self, hidden: torch.Tensor, mask: torch.Tensor | None, sizes: Sizes) -> None:
        self.hidden = hidden
        self.mask = mask
        self.sizes = sizes
        self.given: Entered | None = None
        self.mark: Any = None


class _Lockstep:
    """One call of layers, in slices.

    Args:
        group: the ranks.
        hidden: the own examples.
        mask: of the own examples, or None.
        sizes: the examples of each rank.
        attention: of any layer; all have the same heads.
    """

    def __init__(
        self,
        group: TensorGroup,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        sizes: Sizes,
        attention: DistributedAttentionLayer,
    ) -> None:
        self._group = group
        self._stream = group.stream
        self._slices: list[_Slice] = []
        parts = [_parts(size) for size in sizes]
        own = parts[group.rank]
        per_example = mask is not None and mask.shape[0] == hidden.shape[0]
        masks = torch.split(mask, own) if mask is not None and per_example else [mask] * _SLICES
        for number, (some, theirs) in enumerate(zip(torch.split(hidden, own), masks, strict=True)):
            each = [part[number] for part in parts]
            self._slices.append(_Slice(some, attention.mask_of_all(theirs, each), each))

    def run(self, layers: Sequence[nn.Module]) -> torch.Tensor:
        """Applies layers; returns the own examples."""
        blocks: list[Any] = [block for layer in layers for block in (layer.attention, layer.output)]
        for each in self._slices:
            with self._stream.entered(each.hidden):
                normed = blocks[0].entering(each.hidden)
                each.given = entered(self._group, normed, each.sizes)
                each.mark = self._stream.mark()
        for block, following in zip(blocks, [*blocks[1:], None], strict=True):
            self._apply(block, following)
        made = [each.hidden for each in self._slices]
        for each in self._slices:
            self._stream.wait(each.mark, [each.hidden])
        return torch.cat(made)

    def _apply(self, block: Block, following: Block | None) -> None:
        maps = tuple(each._replace(together=Together()) for each in block.maps())
        drop = SlicedDropout(block.dropout, [each.hidden.shape[0] for each in self._slices])
        for each in self._slices:
            given, each.given = each.given, None
            assert given is not None
            self._stream.wait(each.mark, [given.everyones])
            share = block.share(given, maps, each.mask)
            del given
            with self._stream.entered(share):
                each.hidden, each.given = block.leaving(
                    share, each.sizes, each.hidden, drop, following
                )
                each.mark = self._stream.mark()


def _parts(size: int) -> list[int]:
    return [size - size // _SLICES, size // _SLICES]
