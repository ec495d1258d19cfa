"""What a model computes, as one graph: the forward pass of a microbatch and its gradients.

The model's ``call`` runs once on symbolic tensors. Its gradients are built in the same graph, so
that custom gradients, loops and branches work as in TensorFlow itself, and forward and backward
operations can then be given to processes together.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.tensorflow.compat import graphs, keras, resources
from smdistributed.modelparallel.tensorflow.record.structure import Structure, leaves_of

#: Attributes of operations in a trace. They name the partition that the user asked for, the path
#: of Keras layers in whose call the operation was made, and operations that follow their input.
PARTITION = "_smp_partition"
LAYER = "_smp_layer"
FOLLOWS = "_smp_follows"


@dataclass(eq=False)
class Trace:
    """A traced call of a model.

    Attributes:
        graph: all operations, forward and backward.
        inputs: placeholders of the tensors that the call was given.
        outputs: the call's tensors, then the masks of some, then the model's losses.
        masked: places of the tensors that have a mask.
        num_losses: how many of the outputs are losses of layers.
        structure: of the call's result, whose tensors are outputs.
        output_gradients: placeholder of each output's gradient; None where it has none.
        variables: trainable ones, TensorFlow's.
        variable_gradients: of each; a tensor, ``tf.IndexedSlices`` or None.
        input_gradients: of each input; None where there is none or none is wanted.
        foreign: variables that are not the model's but are used by its call.
        others: those of them whose gradients can be asked for.
        other_gradients: of each of these.
        captured: by name of placeholder, the tensor outside.
        variable_names: by name of placeholder, ``id`` of TensorFlow's variable whose handle it is.
        operations: those that outputs or gradients need, and those with effects, each after what it
            depends on; without placeholders.
        forward: those of them that are needed before any gradient is known.
        added: those of them that only the gradients made: loops get new outputs for theirs.
    """

    graph: Any
    inputs: list[Any]
    outputs: list[Any]
    masked: list[int]
    num_losses: int
    structure: Structure
    output_gradients: list[Any]
    variables: list[Any]
    variable_gradients: list[Any]
    input_gradients: list[Any]
    foreign: list[Any]
    others: list[Any]
    other_gradients: list[Any]
    captured: dict[str, Any] = field(default_factory=dict)
    variable_names: dict[str, int] = field(default_factory=dict)
    operations: list[Any] = field(default_factory=list)
    forward: set[Any] = field(default_factory=set)
    added: set[Any] = field(default_factory=set)
    _masks: dict[Any, int] = field(default_factory=dict)

    @property
    def gradients(self) -> list[Any]:
        """All gradients."""
        return [*self.variable_gradients, *self.input_gradients, *self.other_gradients]

    @functools.cached_property
    def is_half(self) -> bool:
        """Whether some numbers have the narrow range of half precision."""
        return any(each.dtype == tf.float16 for op in self.operations for each in op.outputs)

    def dependencies(self, gradient: Any) -> int:
        """Returns the outputs whose gradients a gradient is made of, a bit each."""
        if not self._masks:
            for place, dy in enumerate(self.output_gradients):
                if dy is not None:
                    self._masks[dy.op] = 1 << place
            for op in self.operations:
                mask = 0
                for tensor in op.inputs:
                    mask |= self._masks.get(tensor.op, 0)
                self._masks[op] = mask
        mask = 0
        for tensor in tensors_in(gradient):
            mask |= self._masks.get(tensor.op, 0)
        return mask


def tensors_in(gradient: Any) -> list[Any]:
    """Returns the tensors that a gradient consists of: none, one, or those of slices."""
    if gradient is None:
        return []
    if isinstance(gradient, tf.IndexedSlices):
        parts = [gradient.values, gradient.indices, gradient.dense_shape]
        return [part for part in parts if part is not None]
    return [gradient]


def results_of(trace: Trace) -> Iterator[Any]:
    """Yields the tensors that a call and its gradient return."""
    yield from trace.outputs
    for gradient in trace.gradients:
        yield from tensors_in(gradient)


class LayerNames:
    """Names of a model's layers, the same in each trace: where ``x#3`` was is where it stays."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[Any, str]] = {}  # with the layer, so that its id stays taken
        self._has_warned = False

    @contextlib.contextmanager
    def watched(self, layer: Any) -> Iterator[None]:
        """Within, a number that the code of a layer counts up is noticed, with a warning, once."""
        before = _numbers_of(layer)
        yield
        changed = [
            key for key, value in _numbers_of(layer).items() if before.get(key, value) != value
        ]
        if changed and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the call of {layer.name} changed its attribute {changed[0]}: Python in a call "
                "runs when the model is traced, not in each step or for each microbatch; keep "
                "what changes in a variable (add_weight).",
                stacklevel=2,
            )

    def of(self, layer: Any) -> str:
        """Returns the name of a layer, numbered in the order of first calls."""
        if id(layer) not in self._names:
            self._names[id(layer)] = (layer, f"{layer.name}#{len(self._names)}")
        return self._names[id(layer)][1]


def _numbers_of(layer: Any) -> dict[str, Any]:
    return {
        key: value
        for key, value in vars(layer).items()
        if type(value) in (int, float) and not key.startswith("_")
    }


def trace(
    name: str,
    layer_names: LayerNames,
    run: Callable[[Sequence[Any]], tuple[Any, list[Any]]],
    specs: Sequence[Any],
    wanted: Sequence[bool],
    create_variable: Callable[..., Any],
    variables: Callable[[], tuple[list[Any], list[Any]]],
    has_effects: bool = True,
) -> Trace:
    """Traces a call of a model, with its gradients.

    Args:
        name: of the model.
        layer_names: of the model.
        run: calls the model on tensors; returns its result and its losses.
        specs: what the model is called with.
        wanted: for each input, whether its gradient is needed.
        create_variable: a variable creator.
        variables: returns the trainable variables and all variables, after the call.
        has_effects: whether what outputs do not need is done as well: a call that was made before
            has done it.
    """
    seen: dict[str, Any] = {}

    def body(*tensors: Any) -> list[Any]:
        with _layers_noted(layer_names):
            result, losses = run(tensors)
        kept = [leaf for leaf in leaves_of(result) if tf.is_tensor(leaf)]
        masks = [keras.mask_of(each) for each in kept]
        seen["masked"] = [place for place, mask in enumerate(masks) if mask is not None]
        seen["structure"] = Structure(result)
        seen["losses"] = len(losses)
        ends = [*kept, *(masks[place] for place in seen["masked"]), *losses]
        with graphs.attributes({FOLLOWS: 1}):
            outputs = [tf.identity(tf.convert_to_tensor(each)) for each in ends]
        # TensorFlow returns copies that wait for all effects, which are on other partitions too.
        seen["outputs"] = outputs
        return outputs

    graph = graphs.trace(f"smp_{name}", body, specs, create_variable)
    outputs: list[Any] = seen["outputs"]
    inside = {placeholder.name for _, placeholder in graphs.captures(graph)}
    inputs = [tensor for tensor in graph.inputs if tensor.name not in inside]
    num_forward = len(graph.get_operations())
    effects = list(graph.control_outputs)
    trainable, every = variables()
    known = {id(variable) for variable in every}
    foreign = [variable for variable in graph.variables if id(variable) not in known]
    # TensorFlow has them in an order that differs between processes.
    places = {id(outside): place for place, (outside, _) in enumerate(graphs.captures(graph))}
    foreign.sort(key=lambda variable: places.get(id(variable.handle), len(places)))
    others = [v for v in foreign if v.trainable and v.dtype.is_floating]
    with graph.as_default(), tf.name_scope("gradients"):
        output_gradients = [
            tf.compat.v1.placeholder(output.dtype, output.shape)
            if output.dtype.is_floating or output.dtype.is_complex
            else None
            for output in outputs
        ]
        sources = [
            *trainable,
            *(x for x, want in zip(inputs, wanted, strict=True) if want),
            *others,
        ]
        targets = [
            (y, dy) for y, dy in zip(outputs, output_gradients, strict=True) if dy is not None
        ]
        gradients = (
            tf.compat.v1.gradients(
                [y for y, _ in targets],
                sources,
                [dy for _, dy in targets],
                colocate_gradients_with_ops=True,
            )
            if sources and targets
            else [None] * len(sources)
        )
    rest = iter(gradients[len(trainable) :])
    result = Trace(
        graph,
        inputs,
        outputs,
        seen["masked"],
        seen["losses"],
        seen["structure"],
        output_gradients,
        trainable,
        gradients[: len(trainable)],
        [next(rest) if want else None for want in wanted],
        foreign,
        others,
        list(rest),
    )
    handles = {id(variable.handle): id(variable) for variable in (*every, *foreign)}
    for outside, placeholder in graphs.captures(graph):
        result.captured[placeholder.name] = outside
        if id(outside) in handles:
            result.variable_names[placeholder.name] = handles[id(outside)]
    _find_needed(result, num_forward, effects, has_effects)
    return result


def _find_needed(trace: Trace, num_forward: int, ends: list[Any], has_effects: bool) -> None:
    """Fills in the operations, ordered: creation is no order, gradients of loops change loops."""
    created = trace.graph.get_operations()
    placeholders = {tensor.op for tensor in trace.graph.inputs}
    placeholders |= {dy.op for dy in trace.output_gradients if dy is not None}
    first = set(created[:num_forward])
    roots = [output.op for output in trace.outputs]
    if has_effects:
        kept = set(ends)  # TensorFlow gives them in an order that differs between processes
        roots += [op for op in created if op in kept]
        roots += [op for op in created[:num_forward] if _has_effect(op)]
    forward = _reachable(roots, placeholders)
    effects = [op for op in created[num_forward:] if _has_effect(op)]
    _put_in_order(trace, created[num_forward:], effects)
    roots += effects
    roots += [tensor.op for gradient in trace.gradients for tensor in tensors_in(gradient)]
    trace.operations = _reachable(roots, placeholders)
    # What a gradient added to the forward pass belongs to it, whenever it was made; but a forward
    # operation that only gradients need stays where the forward pass made it.
    trace.forward = set(forward) | (set(trace.operations) & first)
    trace.forward |= set(_reachable(list(trace.forward), placeholders))
    trace.added = trace.forward - first


def _has_effect(op: Any) -> bool:
    return graphs.is_stateful(op) and op.type not in _PURE


def _put_in_order(trace: Trace, created: Sequence[Any], effects: Sequence[Any]) -> None:
    """Lets operations of gradients that use a resource which one of them writes wait in order.

    In a function TensorFlow does that; these were made after it was finished.
    """
    written = {
        tensor.name
        for op in effects
        for tensor in op.inputs
        if tensor.name in trace.captured and resources.writes(op, tensor)
    }
    newest: dict[str, Any] = {}
    for op in created:
        for name in sorted({tensor.name for tensor in op.inputs} & written):
            if name in newest:
                graphs.add_control_input(op, newest[name])
            newest[name] = op


#: Stateful in name only: without a reader they do nothing.
_PURE = frozenset(
    {"ReadVariableOp", "ResourceGather", "VarHandleOp", "Placeholder", "VariableShape"}
)


def _reachable(roots: list[Any], stops: set[Any]) -> list[Any]:
    """Returns what the roots depend on, themselves included, each after its own dependencies."""
    order: list[Any] = []
    seen: set[Any] = set(stops)
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        op, is_done = stack.pop()
        if is_done:
            order.append(op)
            continue
        if op in seen:
            continue
        seen.add(op)
        stack.append((op, True))
        # TensorFlow gives control inputs in an order that differs between processes.
        stack += [(each, False) for each in sorted(op.control_inputs, key=lambda one: one.name)]
        stack += [(tensor.op, False) for tensor in reversed(op.inputs)]
    return order


@contextlib.contextmanager
def _layers_noted(names: LayerNames) -> Iterator[None]:
    """Within, operations carry the path of the Keras layers in whose call they are made."""
    path: list[str] = []

    def called(layer: Any, call: Callable[[], Any]) -> Any:
        name = names.of(layer)
        if path and path[-1] == name:  # a subclass's own __call__ comes here again
            return call()
        path.append(name)
        try:
            with graphs.attributes({LAYER: "/".join(path)}), names.watched(layer):
                return call()
        finally:
            path.pop()

    with keras.calls_of_layers(called):
        yield
