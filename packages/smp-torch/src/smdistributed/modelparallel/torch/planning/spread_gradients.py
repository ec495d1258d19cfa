"""Gradients that a step asks for, where they pass from one partition to another.

``torch.autograd.grad`` differentiates what one process has computed. Where that lies on several
partitions the call becomes several, in the order of a backward pass, of what lies on one partition
at a time. There it is computed once more from what it was given, with the random numbers of the
first time, and differentiated: a vector-Jacobian product. All of these are nodes like others. So
gradients travel as activations do, the microbatches overlap as they may, and with
``create_graph=True`` the backward pass of the step, or another such call, goes through them.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.planning.asked_gradients import (
    Asked,
    differentiates,
    has_several,
    reads_itself,
)
from smdistributed.modelparallel.torch.planning.products import (
    entrance,
    product,
    total,
)
from smdistributed.modelparallel.torch.planning.ranks import Ranks
from smdistributed.modelparallel.torch.record.costs.work import Work
from smdistributed.modelparallel.torch.record.fakes import Slot
from smdistributed.modelparallel.torch.record.ir import Graph, Node, NodeKind, Value
from smdistributed.modelparallel.torch.record.trace.replicated import sources
from smdistributed.modelparallel.torch.state.carried import Carried
from smdistributed.modelparallel.torch.tensors.functions import SWITCHING_GRADIENTS
from smdistributed.modelparallel.torch.tensors.nested import placeholders, retemplate
from smdistributed.modelparallel.torch.trial.turns import keeps_state

_COMPUTING = (NodeKind.LEAF, NodeKind.CALL)


def spread_gradients(
    graph: Graph, partition_of: Mapping[nn.Module, int], owner_of: Callable[[Slot], int]
) -> None:
    """Spreads the gradients that a step asks for over the partitions that they pass through.

    Args:
        graph: the captured microbatch, which is changed.
        partition_of: the partition of every leaf module.
        owner_of: the partition that holds a parameter.

    Raises:
        UnsupportedError: something between cannot be computed once more.
    """
    if not any(node.target is torch.autograd.grad for node in graph.nodes):
        return
    spreading = _Spreading(Ranks(graph, partition_of, owner_of))
    for node in graph.nodes:
        spreading.take(node)
    graph.nodes = spreading.nodes
    graph.number()


class _Spreading:
    """Copies the nodes of a graph, and spreads gradients.

    Args:
        ranks: of the nodes.

    Attributes:
        nodes: the copy.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.nodes: list[Node] = []
        self._ranks = ranks
        #: The node that stands last and has a rank.
        self._last: Node | None = None
        #: Nodes of one rank that stand in a row will be of one segment.
        self._stretches: dict[Node, int] = {}
        #: What gradients have ended at that stood for a copy, with what differentiates there.
        self._inner: dict[Value, list[Node]] = collections.defaultdict(list)

    def take(self, node: Node) -> None:
        """Takes the next node of the graph."""
        if node.target is not torch.autograd.grad:
            self._add(node)
            return
        asked = Asked.by(node)
        self._check_seen(asked)
        between, reached = self._between(asked.inputs, asked.outputs)
        if self._is_here(between, asked):
            self._add(node)
        else:
            self._spread(node, asked, self._with_differentiated(between), reached)

    def _add(self, node: Node) -> Node:
        node.index = len(self.nodes)
        self.nodes.append(node)
        if self._ranks.place(node):
            last = self._last
            before = -1 if last is None else self._stretches[last]
            self._stretches[node] = before + (last is None or last.rank != node.rank)
            self._last = node
        return node

    def _is_here(self, between: Sequence[Node], asked: Asked) -> bool:
        """Whether autograd will have all that lies between in the segment in progress."""
        if not between or self._last is None:
            return False
        here = self._stretches[self._last]
        made = {value for node in between for value in node.outputs}
        return (
            all(self._stretches[node] == here for node in between)
            and made.issuperset(asked.outputs)
            and all(
                value.node.rank == self._last.rank
                for value in asked.inputs
                if value.node.kind is NodeKind.ATTRIBUTE
            )
        )

    # ------------------------------------------------------------------ what lies between

    def _between(
        self, inputs: Iterable[Value], outputs: Iterable[Value], entrances: Collection[Value] = ()
    ) -> tuple[list[Node], set[Value]]:
        """Returns the nodes that gradients pass through, in order, and the values that they reach.

        Args:
            inputs: where they end.
            outputs: where they start.
            entrances: behind which they do not flow on.
        """
        reached = set(inputs)
        depending = []
        for node in self.nodes:
            given = [*node.inputs, *(node.outputs if has_several(node) else ())]
            if node.kind in _COMPUTING and (
                not reached.isdisjoint(given) or reads_itself(node, reached)
            ):
                made = {value for value in node.outputs if value.requires_grad}
                reached |= made
                if made:
                    depending.append(node)
        needed = set(outputs)
        between: list[Node] = []
        for node in reversed(depending):
            if not needed.isdisjoint(node.outputs):
                between.append(node)
                needed.update(value for value in node.inputs if value not in entrances)
        return between[::-1], reached

    def _with_differentiated(self, between: Sequence[Node]) -> list[Node]:
        """Returns nodes, and with each that differentiates what it differentiates."""
        found = dict.fromkeys(between)
        pending = list(filter(differentiates, between))
        while pending:
            for node in self._differentiated_by(pending.pop()):
                if node not in found:
                    found[node] = None
                    pending += [node] if differentiates(node) else []
        return sorted(found, key=lambda node: node.index)

    def _differentiated_by(self, node: Node) -> list[Node]:
        """Returns what a node differentiates, which runs on its rank."""
        asked = Asked.by(node)
        entrances = node.args[3] if node.target is product else ()
        return self._between(asked.inputs, asked.outputs, entrances)[0]

    def _groups(self, between: Sequence[Node], ends: set[Value]) -> Iterator[list[Node]]:
        """Divides nodes into those of one rank that are differentiated together.

        Gradients end at values: what is computed from one is apart from what makes it, where that
        can be.

        Args:
            between: the nodes, in order; what differentiates, behind what it differentiates.
            ends: the values.
        """
        group: list[Node] = []
        made: set[Value] = set()
        for unit in self._units(between):
            is_end = any(not made.isdisjoint(ends.intersection(each.inputs)) for each in unit)
            if group and (is_end or group[-1].rank != unit[0].rank):
                yield group
                group, made = [], set()
            group += unit
            made.update(value for each in unit for value in each.outputs)
        if group:
            yield group

    def _units(self, between: Sequence[Node]) -> Iterator[list[Node]]:
        """Divides nodes into those that cannot be apart: what differentiates needs the graph."""
        places = {node: place for place, node in enumerate(between)}
        starts = list(range(len(between)))
        for node in filter(differentiates, between):
            own = self._differentiated_by(node)
            first = min((places[each] for each in own), default=places[node])
            assert {each.rank for each in own} <= {node.rank}
            for place in range(first, places[node] + 1):
                starts[place] = min(starts[place], starts[first])
        for _, unit in itertools.groupby(between, key=lambda node: starts[places[node]]):
            yield list(unit)

    # ------------------------------------------------------------------ spreading

    def _spread(
        self, node: Node, asked: Asked, between: Sequence[Node], reached: Collection[Value]
    ) -> None:
        if asked.is_batched:
            raise _refused("is_grads_batched=True", "Call it for one gradient at a time.")
        if node.region is not None:
            raise _refused(
                "a checkpointed call around it",
                "Do not checkpoint what differentiates, or do it inside one module.",
            )
        gradients: dict[Value, list[Value]] = collections.defaultdict(list)
        for value, start in zip(asked.outputs, asked.starts, strict=True):
            if start is None:
                start = self._call(node, torch.ones_like, (value,), [value])[0]
            gradients[value].append(start)
        for group in reversed(list(self._groups(between, set(asked.inputs)))):
            self._differentiate(node, asked, group, gradients, reached)
        for result in node.outputs:
            ((_, position),) = result.source  # type: ignore[misc]
            value = asked.inputs[position]
            found = gradients.get(value)
            if found:
                made = self._node(node, total, tuple(found))
            elif asked.fills:
                made = self._node(node, torch.zeros_like, (value,))
            else:
                raise _refused(
                    f"what leads from a result of {value.node.name or 'the model'} out of sight",
                    "Return it from its module, and pass it on as an argument.",
                )
            result.node, result.source = made, ()
            made.outputs.append(result)
            self._add(made)

    def _differentiate(
        self,
        node: Node,
        asked: Asked,
        group: Sequence[Node],
        gradients: dict[Value, list[Value]],
        reached: Collection[Value],
    ) -> None:
        """Adds nodes that compute a part of what lies between once more, and differentiate it.

        Args:
            node: that asks.
            asked: for this.
            group: the part, of one rank.
            gradients: by the value, those that have come to it; grows by what the part is given.
            reached: the values that gradients flow to.
        """
        made = {value for each in group for value in each.outputs}
        outputs = [value for value in gradients if value in made]
        if not outputs:
            return
        self._check(group, made)
        rank = group[0].rank
        read = dict.fromkeys(value for each in group for value in each.inputs)
        own = [
            value
            for value in dict.fromkeys(asked.inputs)
            if value.node.kind is NodeKind.ATTRIBUTE
            and value.node.rank == rank
            and (value in read or any(reads_itself(each, [value]) for each in group))
        ]
        for value in own:
            if getattr(*value.node.target)._backward_hooks:
                raise _refused(
                    f"{value.node.name}, which has a hook on its gradient",
                    "Take the hook off meanwhile, or change what torch.autograd.grad gives.",
                )
        inner = {
            value
            for each in filter(differentiates, group)
            for value in Asked.by(each).inputs
            if value.node.kind is not NodeKind.ATTRIBUTE
        }
        given = [value for value in read if value not in made and value not in own]
        by = [value for value in given if value.requires_grad and value in reached]
        stands_for: dict[Value, Value] = {}
        entered: dict[Value, Value] = {}
        changed = {value for each in group for value in each.changes}
        for value in given:
            if value in by or value in inner:
                args = (value, asked.creates_graph)
                (stands_for[value],) = self._call(
                    node, entrance, args, [value], beside=group[0], grows=True
                )
                entered[value] = stands_for[value]
            if value in changed:
                copied = stands_for.get(value, value)
                (stands_for[value],) = self._call(
                    node, torch.clone, (copied,), [copied], beside=group[0], grows=True
                )
        for each in group:
            self._again(each, stands_for)
        inside = [
            value
            for value in dict.fromkeys(asked.inputs)
            if value in made and (value in read or has_several(value.node))
        ]
        starts = []
        for value in outputs:
            found = list(gradients[value])
            if value not in asked.inputs or value in inside:
                del gradients[value]
            if len(found) > 1:
                found = self._call(node, total, tuple(found), [value], beside=group[0])
            starts += found
        ends = [*by, *inside, *own]
        given_by = [
            *(entered[value] for value in by),
            *(stands_for[value] for value in inside),
            *own,
        ]
        if not ends:
            return
        results = self._call(
            node,
            product,
            (
                [stands_for[value] for value in outputs],
                given_by,
                starts,
                list(entered.values()),
                asked.creates_graph,
            ),
            ends,
            beside=group[-1],
            work=sum((each.work for each in group), Work()),
        )
        for value, result in zip(ends, results, strict=True):
            gradients[value].append(result)
            if value in inside:
                self._inner[value].append(result.node)

    def _again(self, node: Node, stands_for: dict[Value, Value]) -> None:
        """Adds a node that does once more what another one does.

        Args:
            node: the other.
            stands_for: what it reads in the place of what; grows by what it makes.
        """

        def now(value: Value) -> Value:
            return stands_for.get(value, value)

        again = dataclasses.replace(
            node,
            args=retemplate(node.args, Value, now),
            kwargs=retemplate(node.kwargs, Value, now),
            lent=[(spot, retemplate(content, Value, now)) for spot, content in node.lent],
            changes=list(map(now, node.changes)),
            aliases=list(map(now, node.aliases)),
            outputs=[],
            region=None,
            segment=-1,
            beside=node,
        )
        for value in node.outputs:
            source = now(value.source) if isinstance(value.source, Value) else value.source
            stands_for[value] = value.like(again, source, requires_grad=value.requires_grad)
        for value in again.changes:
            value.is_changed = True
        self._add(again)

    def _call(
        self,
        node: Node,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        like: Sequence[Value],
        *,
        beside: Node | None = None,
        work: Work | None = None,
        grows: bool = False,
    ) -> list[Value]:
        """Adds a call; returns what it gives.

        Args:
            node: of the script, for which it is.
            target: the function.
            args: of it.
            like: what its results look like; of one, that is the result, else they are a list.
            beside: where it runs.
            work: what it does.
            grows: what it gives requires a gradient; else if gradients are differentiated.
        """
        made = self._node(node, target, args)
        made.beside, made.work = beside, work or Work()
        creates_graph = Asked.by(node).creates_graph
        # Else nothing flows on to what it takes the place of.
        made.grad_enabled = creates_graph or target is not entrance
        requires_grad = grows or creates_graph
        for position, value in enumerate(like):
            source = (("item", position),) if target is product else ()
            value.like(made, source, requires_grad=requires_grad)
        self._add(made)
        return made.outputs

    @staticmethod
    def _node(node: Node, target: Callable[..., Any], args: tuple[Any, ...]) -> Node:
        """Returns a new node that calls a function for a node of the script."""
        return Node(
            0,
            NodeKind.CALL,
            target,
            node.name,
            args,
            autocast=node.autocast,
            default_dtype=node.default_dtype,
            switches=node.switches,
        )

    # ------------------------------------------------------------------ checks

    def _check_seen(self, asked: Asked) -> None:
        """Makes sure that gradients flow from module to module by tensors that are passed on.

        Raises:
            UnsupportedError: they may flow by what modules keep, out of another segment.
        """
        before = sources(asked.outputs)
        for value in asked.inputs:
            if not set(self._inner.get(value, ())).isdisjoint(before):
                raise _refused(
                    f"another one, by a result of {value.node.name} that is computed with others "
                    "of its results",
                    "Return that from a module of its own.",
                )
        calls = collections.Counter(n.target for n in self.nodes if n.kind is NodeKind.LEAF)
        here = -1 if self._last is None else self._stretches[self._last]
        for node in before:
            if not any(value.requires_grad for value in node.outputs):
                continue
            if self._stretches.get(node, here) == here:
                continue
            if calls[node.target] > 1 and keeps_state(node.stateful):
                raise _refused(
                    f"{node.name}, which keeps state and is called several times",
                    "Let it keep none, or put the modules between on one partition.",
                )
            if any(True for _ in placeholders((node.args, node.kwargs), Carried)):
                raise _refused(
                    f"{node.name}, which is given an object with state (a cache, say)",
                    "Return tensors and pass them on, or do it inside one module.",
                )

    def _check(self, group: Sequence[Node], made: Collection[Value]) -> None:
        """Makes sure that nodes can be computed once more, and find what they were given.

        Raises:
            UnsupportedError: they cannot.
        """
        for each in group:
            if any(True for _ in placeholders((each.args, each.kwargs), Carried)):
                raise _refused(
                    f"{each.name}, which is given an object with state (a cache, say)",
                    "Return tensors and pass them on, or do it inside one module.",
                )
            if keeps_state(each.stateful) or each.adds:
                raise _refused(
                    f"{each.name}, which changes state in its forward (a counter, a list, a "
                    "buffer), or adds to what others have",
                    "Let it keep none, or put the modules between on one partition.",
                )
        read = {value for each in group for value in each.inputs}
        for changing in self.nodes:
            if changing.target in SWITCHING_GRADIENTS:
                continue
            shown = [
                value
                for value in changing.aliases
                if value in read or value in made
                if value not in made or changing not in group
            ]
            lost = [
                value
                for value in changing.changes
                if value in read and value not in made and not self._is_copied(value, changing)
            ]
            for value in (*shown, *lost):
                raise _refused(
                    f"a result of {value.node.name or 'the model'} that {changing.name} changes in "
                    "place",
                    "Use the out-of-place operation (nn.ReLU(inplace=False), say).",
                )

    def _is_copied(self, value: Value, changing: Node) -> bool:
        """Whether a node changes a copy of a value, which is of another segment."""
        made = self._stretches.get(value.node)
        return made is not None and made != self._stretches.get(changing)


def _refused(what: str, fix: str) -> UnsupportedError:
    return UnsupportedError(
        "torch.autograd.grad asks for a gradient that passes from one partition to another, "
        f"through {what}: what lies between is computed once more, part by part. {fix}"
    )
