"""How a module is split, and putting slices in the places of its linear maps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from smdistributed.modelparallel.torch.tensor_parallel.auto.attention import Fill, SplitAttention
from smdistributed.modelparallel.torch.tensor_parallel.auto.maps import (
    is_transposed,
    sizes_of,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.part_linear import (
    PartLinear,
    Section,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.split_linear import (
    Gate,
    Leaves,
    SplitLinear,
)
from smdistributed.modelparallel.torch.tensor_parallel.module import (
    DistributedModule,
    without_values,
)


@dataclass(frozen=True)
class Plan:
    """How a module is split.

    Attributes:
        columns: the linear maps in it that are split along their outputs, by name.
        rows: those that are split along their inputs.
        divided: attributes of modules in it that count what is split: name of the module, of the
            attribute; ``config.`` before those of its configuration, of which it gets a copy.
        fused: of columns in which several are one, the name and their sizes.
        partly: of columns with outputs that are not split, the name and what lies in the outputs.
            Their weight stays whole.
        attentions: torch's in it, of which every rank gets some heads.
        sums: of rows and attentions, those that are summed where they are made, as code goes on
            with the sum.
        is_mean: what other rows and attentions give is added to what every rank has whole, so that
            the result is the mean over the ranks; else it is the sum.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    divided: tuple[tuple[str, str], ...] = ()
    fused: tuple[tuple[str, tuple[int, ...]], ...] = ()
    partly: tuple[tuple[str, tuple[Section, ...]], ...] = ()
    attentions: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    is_mean: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether more is computed with its sums than to return them."""
        return self.is_mean or bool(self.sums)

    def leaves(self, name: str) -> Leaves:
        """Returns what a row or an attention gives."""
        if name in self.sums:
            return Leaves.SUM
        return Leaves.PART_OF_MEAN if self.is_mean else Leaves.PART_OF_SUM


def cut(module: nn.Module, plan: Plan, size: int, fill: Fill) -> Gate:
    """Puts slices in the places of linear maps; returns what lets them be called.

    Args:
        module: to split, in place.
        plan: how.
        size: how many ranks there are.
        fill: gives a slice its values, from the name and the whole.
    """
    gate = Gate()
    for name in plan.attentions:
        attention = module.get_submodule(name)
        assert isinstance(attention, nn.MultiheadAttention)
        SplitAttention.make_of(attention, gate, fill, plan.leaves(name))
    for name, sections in plan.partly:
        group = DistributedModule._group
        PartLinear.make_of(module.get_submodule(name), sections, gate, size, group.rank)
    fused, partly = dict(plan.fused), dict(plan.partly)
    for split, names in (("outputs", plan.columns), ("inputs", plan.rows)):
        for name in names:
            if name in partly:
                continue
            owner, _, attribute = name.rpartition(".")
            parent, linear = module.get_submodule(owner), module.get_submodule(name)
            with without_values():
                made = SplitLinear(
                    *sizes_of(linear),
                    linear.bias is not None,
                    split,
                    sections=fused.get(name, ()),
                    is_transposed=is_transposed(linear),
                    leaves=plan.leaves(name),
                )
            made.gate = gate
            made.train(linear.training)
            fill(name, linear, made)
            parent._modules[attribute] = made
    for owner, path in plan.divided:
        config = path.rpartition(".")[0]
        if config:  # others read it too
            inner = module.get_submodule(owner)
            setattr(inner, config, copy.copy(getattr(inner, config)))
    for inner, attribute in _counts(module, plan):
        setattr(inner, attribute, getattr(inner, attribute) // size)
    return gate


@contextlib.contextmanager
def counted_whole(module: nn.Module, plan: Plan, size: int) -> Iterator[None]:
    """Inside, attributes of a module that was cut count what all ranks have of it together."""
    counts = [(*each, getattr(*each)) for each in _counts(module, plan)]
    for inner, attribute, number in counts:
        setattr(inner, attribute, number * size)
    try:
        yield
    finally:
        for inner, attribute, number in counts:
            setattr(inner, attribute, number)


def _counts(module: nn.Module, plan: Plan) -> Iterator[tuple[Any, str]]:
    """Yields what has each attribute that counts what is split, and its name."""
    for owner, path in plan.divided:
        inner: Any = module.get_submodule(owner)
        config, _, attribute = path.rpartition(".")
        yield (getattr(inner, config) if config else inner), attribute
