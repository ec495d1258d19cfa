"""Programs of segments that compute for the own pieces of sequences.

With one partition the body that runs for a piece is the step function (``stepping``); with several
it is each segment. The step is recorded for whole sequences, as without pieces, so Python, and what
the ranks of a pipeline agree on, is the same. A program is tried on fakes when its plan is made, on
every rank: that shows which values are pieces where they cross to another partition, and refuses
what cannot be computed from pieces before anything is sent. What was found is what the rank of the
segment does for it in every microbatch.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensorMode
from smdistributed.modelparallel.torch.context_parallel.computing import computing
from smdistributed.modelparallel.torch.context_parallel.layout import Layout
from smdistributed.modelparallel.torch.context_parallel.looking import leaving_nothing, seeing
from smdistributed.modelparallel.torch.context_parallel.proving import Proofs
from smdistributed.modelparallel.torch.context_parallel.refusals import check_used
from smdistributed.modelparallel.torch.context_parallel.run import PieceRun, Ways
from smdistributed.modelparallel.torch.context_parallel.way import Held, Way, WholeRun
from smdistributed.modelparallel.torch.execute.program import Program, check_result
from smdistributed.modelparallel.torch.planning.products import DIFFERENTIATING
from smdistributed.modelparallel.torch.planning.segments import Plan, SegmentNodes
from smdistributed.modelparallel.torch.record.ir import Node, NodeKind, Value
from smdistributed.modelparallel.torch.state.carried import CarriedObjects

DrawsApart = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(eq=False)
class SplitPlan:
    """How a plan is computed with pieces.

    Attributes:
        proofs: of the step function.
        length: of its sequences.
        layouts: how the tensor arguments of a microbatch could be cut, by their positions.
        ways: the calls of each segment.
        held: what a rank has of each value that leaves a segment.
        programs: of the segments.
        most: as many numbers of whole sequences as the arguments have.
    """

    proofs: Proofs
    length: int
    layouts: tuple[Layout | None, ...]
    ways: list[Ways]
    held: dict[Value, Held] = field(default_factory=dict)
    programs: dict[int, SplitProgram] = field(default_factory=dict)
    most: int = 0

    def travelling(self, value: Value) -> Value:
        """Returns what stands for a value as it goes from one segment to another."""
        held = self.held[value]
        if not held.is_piece:
            return value
        assert held.layout is not None
        shape = list(value.shape)
        group, dim = self.proofs.group, held.layout.dim
        shape[dim] = held.layout.size_of(shape[dim], group.rank, group.size)
        return value.piece(shape)

    def whole(self, value: Value, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the whole of a value, for the script. Collective: CP_GROUP, for a piece."""
        held = self.held[value]
        if not held.is_piece:
            return tensor
        assert held.layout is not None
        size = held.whole[held.layout.dim]
        return self.proofs.group.whole(tensor.detach(), size, held.layout)


class SplitProgram:
    """Computes a segment for pieces.

    Args:
        program: makes its program, given what checks the results of leaves.
        segment: the segment.
        split: of its plan.
        fake_mode: of fakes.
        draws_apart: keeps draws out of the step.

    Attributes:
        leaves: the modules that it calls.
    """

    def __init__(
        self,
        program: Callable[[Callable[..., None]], Program],
        segment: SegmentNodes,
        split: SplitPlan,
        fake_mode: FakeTensorMode,
        draws_apart: DrawsApart,
    ) -> None:
        self._program = program(self._check)
        self.leaves = self._program.leaves
        self._segment = segment
        self._split = split
        self._fake_mode = fake_mode
        self._draws_apart = draws_apart
        self._modules = [each for leaf in self.leaves for each in leaf.modules()]
        self._positions = sorted(
            {node.target for node in segment.nodes if node.kind is NodeKind.INPUT}
        )
        self._run: PieceRun | None = None

    def run(
        self, inputs: Sequence[torch.Tensor | None], carried: Any, *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns what the segment gives: pieces, and wholes. Collective: CP_GROUP.

        Args:
            inputs: of the microbatch, whole.
            carried: its objects with state.
            values: what other segments have given.
        """
        self._run = run = self._piece_run(inputs, carried, values)
        try:
            results = self._computed(run, inputs, carried, values)
        finally:
            self._run = None
        for value, held in zip(self._segment.outputs, _held(run, results), strict=True):
            if held != self._split.held[value]:
                raise _another_piece(value)
        return results

    def tell(self, inputs: Sequence[torch.Tensor | None], carried: Any) -> bool:
        """Runs it on fakes, and has it known what it gives.

        Once more, as in a second microbatch, if it leaves something, which that may read.

        Returns:
            whether it computes something of which a rank has a piece.
        """
        with leaving_nothing(self._modules, (), self._draws_apart) as before:
            for is_second in (False, True):
                if is_second and not before.note_changes():
                    break
                fakes = [self._fake(self._split.travelling(each)) for each in self._segment.inputs]
                run = self._piece_run(inputs, carried, fakes)
                results = self._computed(run, inputs, carried, fakes)
        self._split.held.update(zip(self._segment.outputs, _held(run, results), strict=True))
        return run.has_pieces

    def _piece_run(
        self, inputs: Sequence[Any], carried: Any, values: Sequence[torch.Tensor]
    ) -> PieceRun:
        split = self._split
        arguments = [
            (inputs[each], Held(inputs[each].shape, split.layouts[each]))
            for each in self._positions
        ]
        arguments += [
            (each, split.held[value])
            for each, value in zip(values, self._segment.inputs, strict=True)
        ]
        look = functools.partial(self._look, inputs, carried, values)
        ways = split.ways[self._segment.index]
        return PieceRun(ways, arguments, split.length, split.most, look)

    def _computed(
        self, run: PieceRun, inputs: Sequence[Any], carried: Any, values: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        try:
            with computing(run):
                return self._program.run(inputs, carried, *values)
        except UnsupportedError as error:
            node = self._between(error)
            if node is None:
                raise
            raise UnsupportedError(
                f"{error} It is {node.name}, in {node.where}, between modules that stay whole."
            ) from error

    def _between(self, error: Exception) -> Node | None:
        """Returns the node that an error is about, if that is code between modules."""
        frames = [
            (frame, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename == self._program.file
        ]
        node = self._program.node_at(frames[-1][1]) if frames else None
        return node if node is not None and node.kind is NodeKind.CALL else None

    def _look(self, inputs: Sequence[Any], carried: Any, values: Sequence[torch.Tensor]) -> Way:
        """Runs it for the whole; there are no numbers of what this rank has a piece of."""
        given = list(inputs)
        for each in self._positions:
            given[each] = inputs[each].detach().clone()
        wholes = []
        for value, tensor in zip(self._segment.inputs, values, strict=True):
            is_piece = self._split.held[value].is_piece
            wholes.append(self._fake(value) if is_piece else tensor.detach().clone())
        run = WholeRun([*(given[each] for each in self._positions), *wholes], self._fake_mode)
        piece_run, self._run = self._run, None
        try:
            with leaving_nothing(self._modules, (), self._draws_apart), seeing(run):
                self._program.run(given, carried, *wholes)
        finally:
            self._run = piece_run
        return run.way

    def _fake(self, value: Value) -> torch.Tensor:
        with self._fake_mode:
            return value.from_wire(value.wire_buffer(value.device))

    def _check(self, name: str, values: Sequence[Value], *tensors: torch.Tensor) -> None:
        """Makes sure that a leaf gives what was recorded of it; see ``check_results``."""
        run = self._run
        if run is None:
            return  # it is tried, or computed again
        with run.aside():
            for value, tensor in zip(values, tensors, strict=True):
                check_result(name, value, tensor, run.held(tensor).whole)


def split_plan(
    plan: Plan,
    split: SplitPlan,
    inputs: Sequence[torch.Tensor],
    make: Callable[[SegmentNodes], SplitProgram],
) -> None:
    """Tries all segments of a plan on fakes, in their order, so that it is known what they give.

    Args:
        plan: the plan.
        split: of it.
        inputs: fakes of the tensor arguments of a microbatch, and constants.
        make: makes the program of a segment.

    Raises:
        UnsupportedError: a segment cannot be computed from pieces, or nothing is one.
    """
    _check(plan)
    split.most = max(
        each.numel()
        for each, layout in zip(inputs, split.layouts, strict=False)
        if layout is not None
    )
    has_pieces = False
    for segment in plan.segments:
        program = split.programs[segment.index] = make(segment)
        has_pieces |= program.tell(inputs, CarriedObjects())
    check_used(has_pieces=has_pieces)


def _check(plan: Plan) -> None:
    """Refuses what pieces could not be part of.

    Raises:
        UnsupportedError: the plan has such.
    """
    graph = plan.graph
    reasons = {
        "computes gradients by itself": any(
            node.target in DIFFERENTIATING or node.beside is not None for node in graph.nodes
        ),
        "looks at, or changes, gradients of activations": bool(graph.gradients or graph.late),
        "gives modules an object that keeps tensors, such as a cache (use_cache=False leaves that "
        "of Transformers out)": bool(plan.histories),
        "changes buffers of a module that is on several partitions": bool(graph.buffers),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedError(
                f"this step {reason}, which with context_parallel_degree and "
                "pipeline_parallel_degree both above 1 would be of a piece of the sequence: leave "
                "it out, do it inside one module, or set one of the degrees to 1."
            )


def _held(run: PieceRun, results: Sequence[torch.Tensor]) -> list[Held]:
    with run.aside():
        return [run.held(each) for each in results]


def _another_piece(value: Value) -> UnsupportedError:
    return UnsupportedError(
        f"context_parallel_degree splits the sequence over ranks, and what {value.node.name} gives "
        "is cut in another way than when the step was recorded: it depends on data, so other "
        "partitions cannot know. Keep what depends on it inside one module."
    )
