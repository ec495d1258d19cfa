"""Backward passes through modules that ranks compute together.

The exchanges of a backward pass are those of the forward pass in reverse, where autograd comes to
them: a rank whose loss leaves out a module leaves out its exchanges, and the next ones of its peers
would meet others. So before a pass begins autograd is asked which exchanges it will reach, and
ranks compare. Those that lack some start gradients of zeros there; then all have the same, in the
same order, since autograd goes by the order of the forward pass. What is added up is what one
process would add up.

It costs a word a pass, on the host, and a question to autograd an exchange.
"""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from smdistributed.modelparallel.torch.collectives.interface import Collectives
from smdistributed.modelparallel.torch.compat.private.backward import (
    backward_pass_id,
    is_in_backward,
    will_be_reached,
)
from smdistributed.modelparallel.torch.compat.private.checkpointing import (
    Around,
    Reentrant,
    checkpointing_replaced,
)
from smdistributed.modelparallel.torch.compat.private.modes import past_all_modes, pytree
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import (
    lift_in_this_pass,
    slices_as_they_are,
)
from smdistributed.modelparallel.torch.tensor_parallel.words import Moment, Words

Tensors = Sequence[torch.Tensor]
#: Exchanges, by number: the same on all ranks.
Numbers = frozenset[int]
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


@dataclass(frozen=True)
class _Result:
    """What an exchange has given, in a graph of autograd.

    Attributes:
        edge: where its gradient enters the graph, while there is one.
        zeros: such a gradient.
    """

    edge: Callable[[], GradientEdge | None]
    zeros: Callable[[], torch.Tensor]

    @property
    def node(self) -> Node | None:
        """What has given it."""
        edge = self.edge()
        return None if edge is None else edge.node


class PassesAlone:
    """The backward passes of a rank that computes its modules alone; see ``BackwardPasses``."""

    backward = staticmethod(torch.autograd.backward)

    def in_step(self, serving: Serving) -> contextlib.AbstractContextManager[None]:
        """See ``BackwardPasses.in_step``."""
        return contextlib.nullcontext()

    def leave_microbatch(self) -> None:
        """See ``BackwardPasses.leave_microbatch``."""


class BackwardPasses:
    """The backward passes of a tensor-parallel group, and the exchanges that they may reach.

    Args:
        collectives: between the ranks.
        words: of the group.
        is_prescaled: the ranks bring the same examples, so their passes are the same.
    """

    def __init__(self, collectives: Collectives, words: Words, *, is_prescaled: bool) -> None:
        self._collectives = collectives
        self._words = words
        self._is_prescaled = is_prescaled
        self._is_in_step = self._notes = self._is_left = False
        self._results: dict[int, _Result] = {}
        self._names: dict[int, str] = {}
        self._count = 0
        #: The passes of autograd that ranks have agreed on.
        self._agreed: set[int] = set()
        self._serving: Serving = contextlib.nullcontext
        #: Exchanges whose part of a graph has been let go of by a pass.
        self._spent: set[int] = set()
        self._is_called_again = False
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
        self._forget()
        self._is_in_step, self._notes, self._serving = True, True, serving
        try:
            yield
        finally:
            self._is_in_step, self._notes, self._serving = False, False, contextlib.nullcontext
            self._forget()

    def leave_microbatch(self) -> None:
        """Takes note that the graphs so far are of no use to this rank any more."""
        self._is_left = True

    def call(self) -> None:
        """Takes note that all ranks go on with a call."""
        if self._is_left and not is_in_backward():  # what is computed again belongs to a pass
            self._forget()

    def called_outside(self) -> None:
        """Takes note that the model is called outside of steps: graphs live as long as they do."""
        self._notes = True
        for number, result in list(self._results.items()):
            if result.edge() is None:
                del self._results[number]

    def note(self, result: torch.Tensor, name: str) -> None:
        """Takes note of what an exchange has given, of a module of a name."""
        if not self._notes or (is_in_backward() and not self._is_called_again):
            return
        self._count += 1
        self._names[self._count] = name
        node = result.grad_fn
        if node is None:
            return
        weak = weakref.ref(node)
        self._results[self._count] = _Result(
            _kept_edge(result) if self._is_in_step else _passing_edge(weak, result.output_nr),
            functools.partial(torch.zeros, result.shape, dtype=result.dtype, device=result.device),
        )
        node.register_prehook(functools.partial(self._check, weak))

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
                before = self._count
                result = reentrant(again(function), *args)
                if self._count > before:
                    tensors = (
                        each
                        for each in pytree.tree_leaves(result)
                        if torch.is_tensor(each) and each.requires_grad
                    )
                    self.note(next(tensors, torch.empty(0)), "what is checkpointed")
                return result

            return around, call

        return checkpointing_replaced(replace)

    def _forget(self) -> None:
        self._is_left = False
        self._results.clear()
        self._names.clear()
        self._agreed.clear()
        self._spent.clear()

    # ------------------------------------------------------------------ backward passes

    def backward(self, tensors: Tensors, starts: Sequence[torch.Tensor | None]) -> None:
        """Does what ``torch.autograd.backward`` does, together. Collective: TP_GROUP.

        Raises:
            SMPError: the ranks differentiate what they cannot differentiate together.
        """
        if self._results:
            self._differentiate(tensors, starts, frozenset())
        else:
            torch.autograd.backward(tensors, starts)

    def _join(self) -> None:
        """Takes part in a pass of others with zeros. Collective: TP_GROUP."""
        missing = self._missing(frozenset())
        if missing is not None:
            with self._serving(), slices_as_they_are():
                self._differentiate([], [], missing)

    def _differentiate(
        self, tensors: Tensors, starts: Sequence[torch.Tensor | None], zeros: Numbers
    ) -> None:
        nodes = [get_gradient_edge(each).node for each in tensors if each.requires_grad]
        reached = None
        if not zeros:
            try:
                reached = self._attempt(tensors, starts, nodes, retains=False)
            except _DifferError as error:
                zeros = error.missing
        while reached is None:
            results = [self._results[number] for number in sorted(zeros)]
            edges = [edge for each in results if (edge := each.edge()) is not None]
            assert len(edges) == len(results), "ranks agree on what is alive"
            roots = [*nodes, *(each.node for each in edges)]
            given = [*starts, *(each.zeros() for each in results)]
            try:
                # Who differs now may come later to what the others do now.
                self._attempt([*tensors, *edges], given, roots, retains=True)
                return
            except _DifferError as error:
                zeros = zeros | error.missing
        self._spent |= reached

    def _attempt(
        self,
        roots: Sequence[torch.Tensor | GradientEdge],
        starts: Sequence[torch.Tensor | None],
        nodes: Sequence[Node],
        *,
        retains: bool,
    ) -> Numbers:
        """Makes a pass if all ranks reach the same exchanges in it; returns these.

        Raises:
            _DifferError: they do not; nothing was done.
        """
        reached: list[Numbers] = []

        def begin(gradients: object) -> None:
            if not reached:
                self._is_starting = False
                reached.append(self._reached(nodes))
                missing = self._missing(reached[0])
                if missing is not None:
                    raise _DifferError(missing)
                self._agreed.add(backward_pass_id())

        hooks = [each.register_prehook(begin) for each in dict.fromkeys(nodes)]
        self._is_starting = True
        try:
            torch.autograd.backward(roots, starts, retain_graph=retains or None)  # type: ignore[arg-type]
        finally:
            self._is_starting = False
            for hook in hooks:
                hook.remove()
        return reached[0]

    def _check(self, first: Callable[[], Node | None], gradients: object) -> None:
        """Compares a pass that the script has started by itself. Collective: TP_GROUP."""
        if not self._is_starting and backward_pass_id() not in self._agreed:
            node = first()
            reached = self._reached([] if node is None else [node])
            self._missing(reached, can_start_again=False)
            self._spent |= reached
            lift_in_this_pass()
            self._agreed.add(backward_pass_id())

    def _reached(self, roots: Sequence[Node]) -> Numbers:
        """Returns the exchanges that the pass in progress will reach.

        Args:
            roots: where it begins, of which autograd does not tell.
        """
        begins = set(roots)
        found = ((number, result.node) for number, result in self._results.items())
        return frozenset(
            number
            for number, node in found
            if node is not None and (node in begins or will_be_reached(node))
        )

    def _missing(self, reached: Numbers, *, can_start_again: bool = True) -> Numbers | None:
        """Returns what a pass lacks that those of other ranks reach; None if all reach the same.

        Collective: TP_GROUP.

        Raises:
            SMPError: a rank has no part in what others reach.
        """
        own = sorted(reached)
        word = [zlib.crc32(repr(own).encode()), int(can_start_again)]
        everyones = self._words.say(Moment.BACKWARD, self._named(reached), word)
        if all(each[0] == word[0] for each in everyones):
            return None
        if self._is_prescaled:
            self._refuse(f"{_RULE}, as prescaled_batch is on", reached)
        if not all(each[1] for each in everyones):
            self._refuse(
                f"{_RULE}; start passes by model.backward, which makes up for less", reached
            )
        alive = {number for number, result in self._results.items() if result.node is not None}
        here = sorted(alive - self._spent)
        texts = self._collectives.compare_texts(json.dumps([own, here]))
        listed = [json.loads(each) for each in texts]
        union: Numbers = frozenset().union(*(each[0] for each in listed))
        if any(not union <= set(each[1]) for each in listed):
            self._refuse(_NO_PART, reached)
        return union - reached

    def _refuse(self, rule: str, reached: Numbers) -> None:
        self._words.refuse(rule, self._named(reached))

    def _named(self, reached: Numbers) -> str:
        return ", ".join(dict.fromkeys(self._names[each] for each in sorted(reached))) or "nothing"


def _kept_edge(result: torch.Tensor) -> Callable[[], GradientEdge]:
    """Returns where a gradient enters a graph, which it keeps."""
    with past_all_modes():
        edge = get_gradient_edge(result)  # the node alone keeps no graph that Python is part of
    return lambda: edge


def _passing_edge(node: weakref.ref[Node], place: int) -> Callable[[], GradientEdge | None]:
    """Returns where a gradient enters a graph for as long as there is one."""

    def edge() -> GradientEdge | None:
        found = node()
        return None if found is None else GradientEdge(found, place)

    return edge
