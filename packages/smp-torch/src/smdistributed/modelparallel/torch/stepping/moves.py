"""What microbatches change in modules that later ones of the same step may see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from torch import nn

from smdistributed.modelparallel.torch.record.ir import Graph, Node, NodeKind
from smdistributed.modelparallel.torch.record.questions.ahead import depends_on_values
from smdistributed.modelparallel.torch.record.questions.question import Before
from smdistributed.modelparallel.torch.record.trace.tree import Entry, EntryKind, Way
from smdistributed.modelparallel.torch.trial.turns import keeps_state


@dataclass
class Moves:
    """What a microbatch changes.

    Calls are counted from the first one of the microbatch.

    Attributes:
        calls: its calls.
        state: how many there are up to the last that changes more than statistics; 0: none does.
        statistics: the same of each module that has statistics.
        evaluating: modules that do not train in some call.
        behind_backward: by module, the name of what may see in its next forward pass what its
            backward pass has changed.
        buffers: of split modules, those that it changes.
        before: by their number, what the first calls compute, as far as somebody has needed that.
    """

    calls: Sequence[Entry]
    state: int = 0
    statistics: dict[nn.Module, int] = field(default_factory=dict)
    evaluating: set[nn.Module] = field(default_factory=set)
    behind_backward: dict[nn.Module, str] = field(default_factory=dict)
    buffers: Set[tuple[nn.Module, str]] = frozenset()
    before: dict[int, Before] = field(default_factory=dict)

    @staticmethod
    def of(way: Way) -> Moves:
        """Returns what a microbatch changes that has gone a way."""
        if way.moves is None:
            way.moves = Moves._found(way.entries[:-1])
            way.moves.buffers = way.graph.buffers.keys()
        moves: Moves = way.moves
        return moves

    @staticmethod
    def _found(calls: Sequence[Entry]) -> Moves:
        found = Moves(calls)
        differentiates = any(each.kind is EntryKind.BACKWARD for each in calls)
        for number, call in enumerate(calls, 1):
            if call.writes or keeps_state(call.stateful):
                found.state = number
            found.statistics |= dict.fromkeys(call.stateful, number)
            found.evaluating |= _evaluating([call])
            if call.sees_backward and differentiates:
                found.behind_backward[call.target] = call.name
        return found

    def num_seen(self, evaluating: Set[nn.Module]) -> int:
        """Returns how many calls there are up to the last that changes what others see.

        Args:
            evaluating: modules that compute with their statistics.
        """
        seen = self.statistics.keys() & evaluating
        return max([self.state, *(self.statistics[each] for each in seen)])


def numbers_seen(earlier: Sequence[Moves], graph: Graph, where: str) -> list[int]:
    """Returns how many calls of earlier microbatches have to come before a question.

    Args:
        earlier: what they change, in their order.
        graph: what comes before the question in its own microbatch.
        where: who asks, for messages.

    Raises:
        UnsupportedError: a module has to see what a backward pass changes.
    """
    changed = set[tuple[nn.Module, str]]().union(*(each.buffers for each in earlier))
    for node in graph.nodes:
        if node.kind is NodeKind.ATTRIBUTE and node.target in changed:
            raise depends_on_values(
                where, f"{node.name} is a buffer that an earlier microbatch of the step changes"
            )
    leaves = [node for node in graph.nodes if node.kind is NodeKind.LEAF]
    evaluating = _evaluating(leaves).union(*(each.evaluating for each in earlier))
    numbers = [each.num_seen(evaluating) for each in earlier]
    behind: dict[nn.Module, str] = {}
    for moves, number in zip(earlier, numbers, strict=True):
        _check(behind, (each.target for each in moves.calls[:number]), where)
        behind |= moves.behind_backward
    _check(behind, (node.target for node in leaves), where)
    return numbers


def _check(behind: dict[nn.Module, str], called: Iterable[object], where: str) -> None:
    """Makes sure that no module is called that sees what a backward pass has changed."""
    for module in called if behind else ():
        if isinstance(module, nn.Module) and module in behind:
            raise depends_on_values(
                where,
                f"{behind[module] or 'the model'} may see what its backward pass, or a hook on a "
                "gradient, changes in each microbatch, and there are no gradients yet",
            )


def _evaluating(calls: Iterable[Entry | Node]) -> set[nn.Module]:
    return {
        module
        for call in calls
        for module, trains in zip(call.modules, call.flags, strict=True)
        if not trains
    }
