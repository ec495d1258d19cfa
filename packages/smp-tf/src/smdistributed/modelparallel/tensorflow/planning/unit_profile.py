"""From the trace of a call to a profile that is searched without a framework."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common.planning.partitioner import Unit
from smdistributed.modelparallel.common.search.profile import Computation, Figures, UnitProfile
from smdistributed.modelparallel.tensorflow.planning.kept_state import Kept
from smdistributed.modelparallel.tensorflow.planning.layers import (
    MEMORY_WEIGHTS,
    Layers,
    path_of,
    placeable,
)
from smdistributed.modelparallel.tensorflow.record.sizes import is_constant, num_bytes, num_elements
from smdistributed.modelparallel.tensorflow.record.tracing import Trace
from smdistributed.modelparallel.tensorflow.record.work import (
    VIEWS,
    Work,
    kept_by_turns,
    values_of_variables,
    work_of,
)

#: Of a variable that trains, what its optimizer costs.
KeptFor = Callable[[Any], Kept]

#: Forward passes that both passes take together, of what was counted in both.
_BOTH_PASSES = 3.5


@dataclass(eq=False)
class CallFigures:
    """What one call of a model costs.

    Attributes:
        layers: of the trace.
        work: of each layer, its own forward operations.
        made: bytes of the tensors that these make.
        kept: bytes of those that the backward pass reads.
    """

    layers: Layers
    work: Mapping[str, Work]
    made: Mapping[str, float]
    kept: Mapping[str, float]

    @classmethod
    def of(cls, trace: Trace) -> CallFigures:
        """Counts a traced call."""
        ops = placeable(trace)
        layers = Layers.of(trace, ops)
        weights = values_of_variables(ops)
        work: dict[str, Work] = {}
        for name, own in layers.operations.items():
            work[name] = sum((work_of(trace.graph, op, weights) for op in own), Work())
        later = (op for op in trace.operations if op not in trace.forward)
        return cls(
            layers,
            work,
            _by_layer((op, made_bytes(op)) for op in ops),
            _by_layer(kept_bytes(trace.graph, set(ops), later).items()),
        )

    @property
    def all_work(self) -> Work:
        """That of all layers."""
        return sum(self.work.values(), Work())


def unit_profile(
    calls: Sequence[tuple[Trace, CallFigures]], kept_by_optimizer: KeptFor
) -> UnitProfile:
    """Returns the profile of a model.

    Args:
        calls: of it in one microbatch; the first says which layers there are, and what the later
            ones compute in these counts besides.
        kept_by_optimizer: by variable.
    """
    trace, first = calls[0]
    trained = {id(each) for each in trace.variables}
    variables = {id(each): each for each in (*trace.variables, *trace.others)}

    def figures(name: str) -> Figures:
        handles = first.layers.handles.get(name, ())
        ids = [trace.variable_names[handle] for handle in handles]
        own = [variables[key] for key in ids if key in trained]
        kept = list(map(kept_by_optimizer, own))
        of_calls = [each for _, each in calls]
        return Figures(
            computation=computation(
                sum((each.work.get(name, Work()) for each in of_calls), Work())
            ),
            parameter_bytes=float(sum(first.layers.bytes_of[handle] for handle in handles)),
            gradient_bytes=float(sum(map(num_bytes, own))),
            trained_elements=float(sum(map(num_elements, own))),
            small_elements=float(sum(map(num_elements, own))),
            optimizer_bytes=sum(each.num_bytes for each in kept),
            update_bytes=sum(each.moved_bytes for each in kept),
            update_made_bytes=sum(each.made_bytes for each in kept),
            made_bytes=sum(each.made.get(name, 0.0) for each in of_calls),
            kept_bytes=sum(each.kept.get(name, 0.0) for each in of_calls),
        )

    units = {
        word: {unit.name: unit for unit in _walk(first.layers.tree(word))}
        for word in MEMORY_WEIGHTS
    }

    def balanced(name: str) -> dict[str, tuple[float, float]]:
        found = {word: by_name[name] for word, by_name in units.items()}
        return {word: (float(each.compute), float(each.memory)) for word, each in found.items()}

    def profile(unit: Unit) -> UnitProfile:
        return UnitProfile(
            unit.name,
            unit.order,
            unit.splittable,
            figures(unit.name),
            unit.output_bytes,
            tuple(sorted(unit.shared)),
            tuple(map(profile, unit.children)),
            balanced=balanced(unit.name),
        )

    return profile(first.layers.tree("memory"))


def _walk(unit: Unit) -> Iterator[Unit]:
    yield unit
    for child in unit.children:
        yield from _walk(child)


def beside_model(graph: Any, ops: Collection[Any]) -> tuple[Figures, Work]:
    """Returns the figures of what a step function computes for a microbatch outside of its model.

    Args:
        graph: of the step.
        ops: the operations that it makes, those of both passes.
    """
    work = sum((work_of(graph, op) for op in ops), Work())
    forward = {op for op in ops if not _is_of_gradient(op)}
    kept = kept_bytes(graph, forward, (op for op in ops if _is_of_gradient(op)))
    return (
        Figures(
            computation=computation(work.times(1 / _BOTH_PASSES)),
            made_bytes=float(sum(map(made_bytes, forward))),
            kept_bytes=float(sum(kept.values())),
        ),
        work,
    )


def computation(work: Work) -> Computation:
    """Returns work as a profile has it. TensorFlow launches it without Python."""
    return Computation(
        of_weights=work.of_weights,
        of_others=work.products - work.of_weights,
        moved_bytes=work.moved_bytes,
        num_kernels=work.kernels,
    )


def made_bytes(op: Any) -> float:
    """Returns the bytes of the tensors that an operation makes, views left out."""
    return 0.0 if op.type in VIEWS or is_constant(op) else float(sum(map(num_bytes, op.outputs)))


def kept_bytes(graph: Any, forward: Collection[Any], later: Iterable[Any]) -> dict[Any, float]:
    """Returns the bytes that operations make for later ones, by operation.

    Args:
        graph: that has them.
        forward: the operations.
        later: those of the backward pass.
    """
    found: dict[Any, float] = defaultdict(float)
    seen: set[str] = set()
    loops: set[Any] = set()
    for op in later:
        for tensor in op.inputs:
            made = tensor
            while made.op.type in VIEWS and made.op.inputs and made.op in forward:
                made = made.op.inputs[0 if len(made.op.inputs) == 1 else made.value_index]
            if made.op not in forward or made.op.type in VIEWS or made.name in seen:
                continue
            seen.add(made.name)
            found[made.op] += num_bytes(made)
            if made.dtype == tf.variant and made.op not in loops:
                loops.add(made.op)
                found[made.op] += kept_by_turns(graph, made.op)
    return found


def _by_layer(sizes: Iterable[tuple[Any, float]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for op, size in sizes:
        found[["", *path_of(op)][-1]] += size
    return found


def _is_of_gradient(op: Any) -> bool:
    """Tells whether a tape or ``tf.gradients`` made an operation, by the names that they give."""
    return any(part.startswith("gradient") for part in op.name.split("/")[:-1])
