"""Between the states of a Transformers model and of its distributed version, from one map a family.

A map is a list of rows; both directions, and the values that a replaced module takes over, follow
from it. Only names and shapes are looked at, and tensors are handed on or viewed, not kept twice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import CheckpointError

State = Mapping[str, torch.Tensor]
#: How one map to queries, keys and values is packed along its outputs: one after the other, or for
#: each head its three.
Packing = Literal["outputs", "heads"]


@dataclass(frozen=True)
class Row:
    """A module with weight and bias, or either of them.

    Attributes:
        theirs: its name in Transformers.
        ours: its name here; three where queries, keys and values are packed there.
        transposed: their weight is ``(in, out)``.
        packing: how they are packed; None where they are not.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    packing: Packing | None = None


def row(theirs: str, *ours: str, transposed: bool = False, packing: Packing | None = None) -> Row:
    """Returns a row."""
    return Row(theirs, ours, transposed, packing)


@dataclass(frozen=True)
class FamilyMap:
    """The map of one family.

    Attributes:
        name: of the family, for messages.
        their_layer, our_layer: what the names of a layer begin with; ``{}`` is its number.
        layer: rows of each layer.
        outside: rows of what is outside the layers.
        dropped: buffers of theirs that are no weights, as a regular expression of whole names.
        tied: names of theirs that may repeat the weight of another one of theirs.
        keeps_others: other names are the same on both sides: an encoder in a model.
    """

    name: str
    their_layer: str
    our_layer: str
    layer: Sequence[Row]
    outside: Sequence[Row] = ()
    dropped: str = ""
    tied: tuple[str, str] | None = None
    keeps_others: bool = False

    def to_ours(self, state: State, *, num_heads: int | None = None) -> dict[str, torch.Tensor]:
        """Returns the state of the distributed version.

        Args:
            state: of the Transformers model.
            num_heads: where queries, keys and values are packed by heads.

        Raises:
            CheckpointError: a name that no row has.
        """
        tied = self._is_tied(state)
        by_name = {each.theirs: each for each in (*self.layer, *self.outside)}
        found: dict[str, torch.Tensor] = {}
        for name, tensor in state.items():
            if tied and self.tied is not None and name == self.tied[0]:
                continue
            if self.dropped and re.fullmatch(self.dropped, name):
                continue
            prefix, module, kind = self._parse(name, self.their_layer)
            theirs = by_name.get(module)
            if theirs is None or (prefix is not None) != (theirs in self.layer):
                if not self.keeps_others:
                    raise CheckpointError(f"{name} is no part of a {self.name} model.")
                found[name] = tensor
                continue
            if theirs.transposed and kind == "weight":
                tensor = tensor.t()
            parts = _unpacked(tensor, theirs, num_heads)
            for ours, part in zip(theirs.ours, parts, strict=True):
                start = "" if prefix is None else self._swapped(prefix, self.their_layer)
                found[f"{start}{ours}.{kind}"] = part
        return found

    def to_theirs(self, state: State, *, num_heads: int | None = None) -> dict[str, torch.Tensor]:
        """Returns the state of the Transformers model; see ``to_ours``."""
        by_name = {ours: each for each in (*self.layer, *self.outside) for ours in each.ours}
        found: dict[str, torch.Tensor] = {}
        for name, tensor in state.items():
            prefix, module, kind = self._parse(name, self.our_layer)
            theirs = by_name.get(module)
            if theirs is None or (prefix is not None) != (theirs in self.layer):
                if not self.keeps_others:
                    raise CheckpointError(f"{name} is no part of a distributed {self.name} model.")
                found[name] = tensor
                continue
            start = "" if prefix is None else prefix
            if theirs.packing is not None:
                if module != theirs.ours[0]:
                    continue  # goes with the first
                tensor = _packed(
                    [state[f"{start}{ours}.{kind}"] for ours in theirs.ours], theirs, num_heads
                )
            if theirs.transposed and kind == "weight":
                tensor = tensor.t()
            target = "" if prefix is None else self._swapped(prefix, self.our_layer)
            found[f"{target}{theirs.theirs}.{kind}"] = tensor.contiguous()
        if self.tied is not None and self.tied[0] not in found:
            found[self.tied[0]] = found[self.tied[1]]
        return found

    def constants_of(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Returns what the state of a model of theirs has that is no weight: causal masks.

        Models of Transformers before 4.28 have some, and load no state without.
        """
        if not self.dropped:
            return {}
        return {
            name: tensor
            for name, tensor in module.state_dict().items()
            if re.fullmatch(self.dropped, name) and not tensor.is_meta
        }

    def _is_tied(self, state: State) -> bool:
        if self.tied is None or self.tied[0] not in state:
            return False
        one, other = (state.get(name) for name in self.tied)
        if one is None or other is None:
            return False
        if one is other or one.is_meta or other.is_meta:
            return one is other
        return one.shape == other.shape and bool(torch.equal(one, other))

    def _parse(self, name: str, layer: str) -> tuple[str | None, str, str]:
        """Returns what names the layer, the module in it, and which tensor of it that is."""
        pattern = re.escape(layer).replace(r"\{\}", r"\d+")
        start = "(.*?)" if self.keeps_others else "()"
        match = re.match(f"({start}{pattern})(.+)", name)
        rest = name if match is None else match[3]
        module, _, kind = rest.rpartition(".")
        return (None if match is None else match[1]), module, kind

    def _swapped(self, prefix: str, layer: str) -> str:
        """Returns what names the same layer on the other side."""
        other = self.our_layer if layer == self.their_layer else self.their_layer
        pattern = re.escape(layer).replace(r"\{\}", r"(\d+)")
        found = re.search(f"{pattern}$", prefix)
        assert found is not None
        return prefix[: found.start()] + other.format(found[1])


def _unpacked(tensor: torch.Tensor, theirs: Row, num_heads: int | None) -> Sequence[torch.Tensor]:
    if theirs.packing is None:
        return [tensor]
    if theirs.packing == "outputs":
        return tensor.chunk(3)
    heads = tensor.unflatten(0, (_needed(num_heads), 3, -1))  # type: ignore[no-untyped-call]
    return [each.flatten(0, 1) for each in heads.unbind(1)]


def _packed(parts: Sequence[torch.Tensor], theirs: Row, num_heads: int | None) -> torch.Tensor:
    if theirs.packing == "outputs":
        return torch.cat(list(parts))
    size = (_needed(num_heads), -1)
    heads = [torch.unflatten(part, 0, size) for part in parts]
    return torch.stack(heads, dim=1).flatten(0, 2)


def _needed(num_heads: int | None) -> int:
    if num_heads is None:
        raise ValueError(
            "queries, keys and values of this family are packed by heads: pass "
            "num_attention_heads, as the model's configuration has it."
        )
    return num_heads
