"""What is done for a call that was proven."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from smdistributed.modelparallel.torch.compat.private.modes import pytree
from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.context_parallel.attention import Places, attention
from smdistributed.modelparallel.torch.context_parallel.calls import put_together
from smdistributed.modelparallel.torch.context_parallel.dropout import dropout
from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup
from smdistributed.modelparallel.torch.context_parallel.layout import Layout, cut
from smdistributed.modelparallel.torch.context_parallel.losses import mean_over_tokens, with_sum
from smdistributed.modelparallel.torch.context_parallel.moving import Assembly
from smdistributed.modelparallel.torch.context_parallel.proof import Kind
from smdistributed.modelparallel.torch.context_parallel.refusals import refused


class Action(Protocol):
    """Makes a call, with the tensors that this rank has."""

    def run(
        self,
        group: ContextGroup,
        function: Callable[..., Any],
        spec: Any,
        leaves: Sequence[Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """Returns its result.

        Args:
            group: the ranks that share the sequence.
            function: that is called.
            spec: the structure of the arguments.
            leaves: the arguments as this rank's Python gave them, with holes for tensors.
            tensors: of this rank.
        """


@dataclass(frozen=True)
class OfWhole:
    """A call with no tensor that is cut: made as for the whole sequence, on every rank alike.

    Attributes:
        leaves: the arguments for the whole; this rank's Python may have given lengths of pieces.
    """

    leaves: tuple[Any, ...]

    def run(
        self,
        group: ContextGroup,
        function: Callable[..., Any],
        spec: Any,
        leaves: Sequence[Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """See ``Action.run``."""
        args, kwargs = put_together(spec, self.leaves, tensors)
        return function(*args, **kwargs)


@dataclass(frozen=True)
class OfPieces:
    """A call that computes pieces from pieces.

    Attributes:
        arguments: with the length of a piece, and holes for tensors.
        cuts: how each tensor is cut of which this rank has the whole; None: not at all.
        kind: ``Kind.SUM`` or ``Kind.MEAN`` if its one result is to be added up over the ranks.
        share: which part of the tokens this rank has, for a mean.
    """

    arguments: tuple[Any, ...]
    cuts: tuple[Layout | None, ...]
    kind: Kind = Kind.CUT
    share: float = 1.0

    def run(
        self,
        group: ContextGroup,
        function: Callable[..., Any],
        spec: Any,
        leaves: Sequence[Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """See ``Action.run``. Collective for sums and means: CP_GROUP."""
        args, kwargs = put_together(spec, self.arguments, _pieces(group, tensors, self.cuts))
        result = function(*args, **kwargs)
        if self.kind is Kind.SUM:
            return group.total(result)
        if self.kind is Kind.MEAN:
            # The mean of no tokens is no number, and is none of those that count.
            result = (
                result * self.share
                if self.share
                else result.masked_fill(result.new_ones((), dtype=torch.bool), 0)
            )
            return group.total(result)
        return result


@dataclass(frozen=True)
class OfAttention:
    """Attention to the whole sequence.

    Attributes:
        arguments: for the whole, as a scale may go by its length; with holes for tensors.
        places: where the tokens are.
    """

    arguments: tuple[Any, ...]
    places: Places

    def run(
        self,
        group: ContextGroup,
        function: Callable[..., Any],
        spec: Any,
        leaves: Sequence[Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """See ``Action.run``. Collective: CP_GROUP."""
        args, kwargs = put_together(spec, self.arguments, tensors)
        return attention(group, self.places, *args, **kwargs)


@dataclass(frozen=True)
class OfDropout:
    """Dropout of a piece.

    Attributes:
        arguments: for the whole, with holes for tensors.
        whole: shape of the whole.
        layout: how it is cut.
    """

    arguments: tuple[Any, ...]
    whole: torch.Size
    layout: Layout

    def run(
        self,
        group: ContextGroup,
        function: Callable[..., Any],
        spec: Any,
        leaves: Sequence[Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """See ``Action.run``."""
        args, kwargs = put_together(spec, self.arguments, tensors)
        return dropout(group, self.whole, self.layout, args, kwargs)


@dataclass(frozen=True)
class OfGathered:
    """A call that gives few numbers of the whole: made for it, on every rank alike.

    Attributes:
        arguments: for the whole, with holes for tensors.
        layouts: how each tensor is cut of which this rank has a piece; None: not at all.
        sizes: of the dims that are cut, of the wholes.
        gives_views: its results see what it is given, so that they are copied.
    """

    arguments: tuple[Any, ...]
    layouts: tuple[Layout | None, ...]
    sizes: tuple[int, ...]
    gives_views: bool

    def run(
        self,
        group: ContextGroup,
        function: Callable[..., Any],
        spec: Any,
        leaves: Sequence[Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """See ``Action.run``. Collective: CP_GROUP."""
        wholes = [
            tensor if layout is None else group.whole(tensor, size, layout)
            for tensor, size, layout in zip(tensors, self.sizes, self.layouts, strict=True)
        ]
        args, kwargs = put_together(spec, self.arguments, wholes)
        gathered = [
            (each, version_of(each))
            for each, layout in zip(wholes, self.layouts, strict=True)
            if layout is not None
        ]
        result = function(*args, **kwargs)
        if any(version_of(each) != before for each, before in gathered):
            name = str(getattr(function, "__name__", function))
            raise refused(name, "reads across the sequence, and changes what it is given in place")
        # A view would keep all that was gathered.
        return (
            pytree.tree_map_only(torch.Tensor, torch.clone, result) if self.gives_views else result
        )


@dataclass(frozen=True)
class OfMoved:
    """A call that moves tokens.

    Attributes:
        assemblies: put its results together.
        structure: of these.
        gives_views: they would see what the call is given, and some are copied.
    """

    assemblies: tuple[Assembly, ...]
    structure: Any
    gives_views: bool

    def run(
        self,
        group: ContextGroup,
        function: Callable[..., Any],
        spec: Any,
        leaves: Sequence[Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """See ``Action.run``. Collective: CP_GROUP, if tokens are swapped."""
        results = [each.run(group, tensors) for each in self.assemblies]
        return pytree.tree_unflatten(results, self.structure)


@dataclass(frozen=True)
class OfAligned:
    """A call with pieces of several windows, some of which are moved before it.

    Attributes:
        moves: what puts another piece together of each tensor; None for those that stay.
        action: what is done then.
        gives_views: the results would see what the call is given.
    """

    moves: tuple[Assembly | None, ...]
    action: Action
    gives_views: bool

    def run(
        self,
        group: ContextGroup,
        function: Callable[..., Any],
        spec: Any,
        leaves: Sequence[Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """See ``Action.run``. Collective: CP_GROUP."""
        moved = [
            tensor if move is None else move.run(group, [tensor])
            for tensor, move in zip(tensors, self.moves, strict=True)
        ]
        return self.action.run(group, function, spec, leaves, moved)


def gives_copies(action: Action) -> bool:
    """Whether results are copies of what code takes them for views of."""
    return isinstance(action, OfGathered | OfMoved | OfAligned) and action.gives_views


@dataclass(frozen=True)
class OfMeanLoss:
    """A mean over the tokens that count.

    Attributes:
        cuts: how each tensor is cut of which this rank has the whole; None: not at all.
    """

    cuts: tuple[Layout | None, ...]

    def run(
        self,
        group: ContextGroup,
        function: Callable[..., Any],
        spec: Any,
        leaves: Sequence[Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """See ``Action.run``. Collective: CP_GROUP."""
        args, kwargs = put_together(spec, leaves, _pieces(group, tensors, self.cuts))
        return mean_over_tokens(function, group, *with_sum(function, args, kwargs))


def _pieces(
    group: ContextGroup, tensors: Sequence[torch.Tensor], cuts: Sequence[Layout | None]
) -> list[torch.Tensor]:
    return [
        tensor if layout is None else cut(tensor, layout, group.rank, group.size)
        for tensor, layout in zip(tensors, cuts, strict=True)
    ]
