"""Backward passes through modules that ranks compute together.

The exchanges of a backward pass are those of the forward pass in reverse, where autograd comes to
them: a rank whose loss leaves out a module leaves out its exchanges, and the next ones of its peers
would meet others. So before a pass begins autograd is asked which exchanges it will reach, and
ranks compare. Those that lack some start gradients of zeros there; then all have the same, in the
same order, since autograd goes by the order of the forward pass. What is added up is what one
process would add up.

In a pipeline that is so for each segment and microbatch: the exchanges of its forward pass, whose
graph ends where the segment does, are those that its backward pass may reach.

It costs a word a pass, on the host, and a question to autograd an exchange.
"""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from smdistributed.modelparallel.torch.collectives.interface import Collectives
from smdistributed.modelparallel.torch.compat.private.backward import (
    backward_pass_id,
    is_in_backward,
    put_own_hook,
)
from smdistributed.modelparallel.torch.compat.private.checkpointing import (
    Around,
    Reentrant,
    checkpointing_replaced,
)
from smdistributed.modelparallel.torch.compat.private.modes import pytree
from smdistributed.modelparallel.torch.tensor_parallel.noted import Noted, Numbers
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import (
    lift_in_this_pass,
    slices_as_they_are,
)
from smdistributed.modelparallel.torch.tensor_parallel.words import Moment, Words

#: As ``torch.autograd.backward`` takes them.
Roots = Sequence[torch.Tensor | GradientEdge]
Starts = Sequence[torch.Tensor | None]
Serving = Callable[[], contextlib.AbstractContextManager[object]]
_RULE = "must differentiate the same modules in the same order, since they compute them together"
_NO_PART = (
    f"{_RULE}: gradients of zeros stand for what a loss leaves out, but not for what has been "
    "differentiated before, or was computed without gradients"
)


class _DifferError(Exception):
    """Leaves a pass that has not begun, since those of other ranks reach other exchanges.

    Args:
        missing: what this one lacks.
    """

    def __init__(self, missing: Numbers) -> None:
        super().__init__()
        self.missing = missing


class Resting(Protocol):
    """Slices that may stand for whole parameters when a backward pass begins."""

    def wake_in_this_pass(self) -> None:
        """Has a backward pass use slices, and add to their gradients; then they rest again."""


class PassesAlone:
    """The backward passes of a rank that computes its modules alone; see ``BackwardPasses``."""

    has_differed = False
    backward = staticmethod(torch.autograd.backward)

    def in_step(self, serving: Serving) -> contextlib.AbstractContextManager[None]:
        """See ``BackwardPasses.in_step``."""
        return contextlib.nullcontext()

    def leave_microbatch(self) -> None:
        """See ``BackwardPasses.leave_microbatch``."""

    def noting(self) -> contextlib.AbstractContextManager[None]:
        """See ``BackwardPasses.noting``."""
        return contextlib.nullcontext()

    def backward_of(self, noted: Noted | None, roots: Roots, starts: Starts) -> None:
        """See ``BackwardPasses.backward_of``."""
        if roots:
            torch.autograd.backward(roots, starts)  # type: ignore[arg-type]


class BackwardPasses:
    """The backward passes of a tensor-parallel group, and the exchanges that they may reach.

    Args:
        collectives: between the ranks.
        words: of the group.
        is_prescaled: the ranks bring the same examples, so their passes are the same.

    Attributes:
        has_differed: in the step in progress, a pass of this rank had not what others had.
        resting: the slices of models, which passes through calls outside of steps use as well.
    """

    def __init__(self, collectives: Collectives, words: Words, *, is_prescaled: bool) -> None:
        self._collectives = collectives
        self._words = words
        self._is_prescaled = is_prescaled
        self._notes = self._is_left = False
        self._noted = Noted(keeps_graphs=False)
        self._serving: Serving = contextlib.nullcontext
        self._is_called_again = False
        self.has_differed = False
        self.resting: weakref.WeakSet[Resting] = weakref.WeakSet()
        #: A pass is being started that ranks will agree on.
        self._is_starting = False
        words.join = self._join

    # ------------------------------------------------------------------ forward passes

    @contextlib.contextmanager
    def in_step(self, serving: Serving) -> Iterator[None]:
        """Inside, a step runs as it is written, and its graphs live as long as a microbatch.

        Args:
            serving: a context for the passes that other ranks make alone.
        """
        self._forget(keeps_graphs=True)
        self.has_differed = False
        self._notes, self._serving = True, serving
        try:
            yield
        finally:
            self._notes, self._serving = False, contextlib.nullcontext
            self._forget(keeps_graphs=False)

    def leave_microbatch(self) -> None:
        """Takes note that the graphs so far are of no use to this rank any more."""
        self._is_left = True

    def call(self) -> None:
        """Takes note that all ranks go on with a call."""
        if self._is_left and not is_in_backward():  # what is computed again belongs to a pass
            self._forget(keeps_graphs=True)

    def called_outside(self) -> None:
        """Takes note that the model is called outside of steps: graphs live as long as they do."""
        self._notes = True
        self._noted.drop_dead()

    def note(self, result: torch.Tensor, name: str, *, is_differentiated: bool = False) -> None:
        """Takes note of what an exchange has given, of a module of a name.

        Args:
            result: what it has given.
            name: of the module.
            is_differentiated: it is part of a backward pass that has a graph.
        """
        counts = is_differentiated or self._is_called_again or not is_in_backward()
        if not (self._notes and counts):
            return
        node = self._noted.add(result, name)
        if node is not None:
            put_own_hook(node.register_prehook, functools.partial(self._check, weakref.ref(node)))

    @contextlib.contextmanager
    def noting(self) -> Iterator[Noted]:
        """Inside, a segment of a pipeline computes forward; gives what ``backward_of`` takes."""
        noted = Noted(keeps_graphs=True, is_used_once=True)
        with self._going_on_with(noted):
            yield noted

    @contextlib.contextmanager
    def _going_on_with(self, noted: Noted) -> Iterator[None]:
        former = self._notes, self._noted
        self._notes, self._noted = True, noted
        try:
            yield
        finally:
            self._notes, self._noted = former

    def noting_checkpoints(self) -> contextlib.AbstractContextManager[None]:
        """Has calls count that are made again in backward passes, and differentiated there."""

        def again(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                self._is_called_again = is_in_backward()
                try:
                    return function(*args)
                finally:
                    self._is_called_again = False

            return call

        def replace(around: Around, reentrant: Reentrant) -> tuple[Around, Reentrant]:
            def call(function: Callable[..., Any], *args: Any) -> Any:
                before = self._noted.count
                result = reentrant(again(function), *args)
                if self._noted.count > before:
                    tensors = (
                        each
                        for each in pytree.tree_leaves(result)
                        if torch.is_tensor(each) and each.requires_grad
                    )
                    self.note(next(tensors, torch.empty(0)), "what is checkpointed")
                return result

            return around, call

        return checkpointing_replaced(replace)

    def _forget(self, *, keeps_graphs: bool) -> None:
        self._is_left = False
        self._noted = Noted(keeps_graphs=keeps_graphs)

    # ------------------------------------------------------------------ backward passes

    def backward(self, roots: Roots, starts: Starts, *, retain_graph: bool = False) -> None:
        """Does what ``torch.autograd.backward`` does, together. Collective: TP_GROUP.

        Args:
            roots: as of ``torch.autograd.backward``.
            starts: the same.
            retain_graph: the same.

        Raises:
            SMPError: the ranks differentiate what they cannot differentiate together.
        """
        if self._noted.results:
            self._differentiate(roots, starts, frozenset(), retains=retain_graph)
        else:
            torch.autograd.backward(roots, starts, retain_graph=retain_graph or None)  # type: ignore[arg-type]

    def backward_of(self, noted: Noted | None, roots: Roots, starts: Starts) -> None:
        """Does the same for a segment of a pipeline, if it has exchanges. Collective: TP_GROUP.

        Args:
            noted: what its forward pass has exchanged, if that was noted.
            roots: as of ``torch.autograd.backward``; there may be none.
            starts: the same.

        Raises:
            SMPError: the ranks differentiate what they cannot differentiate together.
        """
        if noted is not None and noted.count:
            with self._going_on_with(noted):
                self._differentiate(roots, starts, frozenset())
        elif roots:
            torch.autograd.backward(roots, starts)  # type: ignore[arg-type]

    def _join(self) -> None:
        """Takes part in a pass of others with zeros. Collective: TP_GROUP."""
        missing = self._missing(frozenset())
        if missing is not None:
            with self._serving(), slices_as_they_are():
                self._differentiate([], [], missing)

    def _differentiate(
        self, roots: Roots, starts: Starts, zeros: Numbers, *, retains: bool = False
    ) -> None:
        noted = self._noted
        nodes = [node for each in roots if (node := _node_of(each)) is not None]
        reached = None
        if not zeros:
            try:
                reached = self._attempt(roots, starts, nodes, retains=retains)
            except _DifferError as error:
                zeros = error.missing
        while reached is None:
            results = [noted.results[number] for number in sorted(zeros)]
            edges = [edge for each in results if (edge := each.edge()) is not None]
            assert len(edges) == len(results), "ranks agree on what is alive"
            every = [*nodes, *(each.node for each in edges)]
            given = [*starts, *(each.zeros() for each in results)]
            # Who differs now may come later to what the others do now.
            retains = retains or not noted.is_used_once
            try:
                reached = self._attempt([*roots, *edges], given, every, retains=retains)
            except _DifferError as error:
                zeros = zeros | error.missing
        if not retains:
            noted.spent |= reached

    def _attempt(
        self, roots: Roots, starts: Starts, nodes: Sequence[Node], *, retains: bool
    ) -> Numbers:
        """Makes a pass if all ranks reach the same exchanges in it; returns these.

        Raises:
            _DifferError: they do not; nothing was done.
        """
        reached: list[Numbers] = []

        def begin(gradients: object) -> None:
            if not reached:
                self._is_starting = False
                reached.append(self._noted.reached(nodes))
                self._agree(reached[0])
                self._noted.agreed.add(backward_pass_id())

        if not roots:  # no result of a segment has a gradient here
            self._agree(frozenset())
            return frozenset()
        hooks = [each.register_prehook(begin) for each in dict.fromkeys(nodes)]
        self._is_starting = True
        try:
            torch.autograd.backward(roots, starts, retain_graph=retains or None)  # type: ignore[arg-type]
        finally:
            self._is_starting = False
            for hook in hooks:
                hook.remove()
        return reached[0]

    def _agree(self, reached: Numbers) -> None:
        """Goes on if all ranks reach the same. Collective: TP_GROUP.

        Raises:
            _DifferError: they do not.
        """
        missing = self._missing(reached)
        if missing is not None:
            raise _DifferError(missing)

    def _check(self, first: Callable[[], Node | None], gradients: object) -> None:
        """Compares a pass that the script has started by itself. Collective: TP_GROUP."""
        for each in self.resting:
            each.wake_in_this_pass()
        noted = self._noted
        if not self._is_starting and backward_pass_id() not in noted.agreed:
            node = first()
            reached = noted.reached([] if node is None else [node])
            self._missing(reached, can_start_again=False)
            noted.spent |= reached
            lift_in_this_pass()
            noted.agreed.add(backward_pass_id())

    def _missing(self, reached: Numbers, *, can_start_again: bool = True) -> Numbers | None:
        """Returns what a pass lacks that those of other ranks reach; None if all reach the same.

        Collective: TP_GROUP.

        Raises:
            SMPError: a rank has no part in what others reach.
        """
        own = sorted(reached)
        word = [zlib.crc32(repr(own).encode()), int(can_start_again)]
        everyones = self._words.say(Moment.BACKWARD, self._noted.names_of(reached), word)
        if all(each[0] == word[0] for each in everyones):
            return None
        self.has_differed = True
        if self._is_prescaled:
            self._refuse(f"{_RULE}, as prescaled_batch is on", reached)
        if not all(each[1] for each in everyones):
            self._refuse(
                f"{_RULE}; start passes by model.backward, which makes up for less", reached
            )
        texts = self._collectives.compare_texts(json.dumps([own, sorted(self._noted.left)]))
        listed = [json.loads(each) for each in texts]
        union: Numbers = frozenset().union(*(each[0] for each in listed))
        if any(not union <= set(each[1]) for each in listed):
            self._refuse(_NO_PART, reached)
        return union - reached

    def _refuse(self, rule: str, reached: Numbers) -> None:
        self._words.refuse(rule, self._noted.names_of(reached))


def _node_of(root: torch.Tensor | GradientEdge) -> Node | None:
    """Returns where a pass begins; None if nothing is differentiated there."""
    if isinstance(root, torch.Tensor):
        return get_gradient_edge(root).node if root.requires_grad else None
    return root.node
