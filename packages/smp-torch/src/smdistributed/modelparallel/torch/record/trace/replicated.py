"""Computing replicated values from the real inputs of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.record.ir import Node, NodeKind, Value
from smdistributed.modelparallel.torch.state.switches import default_dtype, switched
from smdistributed.modelparallel.torch.tensors.nested import fill, follow, placeholders


def sources(values: Iterable[Value], known: Container[Value] = ()) -> list[Node]:
    """Returns the nodes that values are computed from, in no order.

    Args:
        values: the values.
        known: those that are there already.
    """
    found: dict[Node, None] = {}
    pending = list(values)
    while pending:
        value = pending.pop()
        node = value.node
        if node in found or value in known:
            continue
        found[node] = None
        pending += node.inputs
        pending += [output.source for output in node.outputs if isinstance(output.source, Value)]
    return list(found)


@contextlib.contextmanager
def _under(node: Node) -> Iterator[None]:
    """Inside, what a late node was called under holds, as it does for those of a segment."""
    with contextlib.ExitStack() as stack:
        if node.late:
            stack.enter_context(torch.no_grad())
            stack.enter_context(switched(node.switches))
            stack.enter_context(default_dtype(node.default_dtype))
            for device, dtype in node.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
        yield


def evaluate_replicated(
    function: Any,
    args: Any,
    kwargs: Any,
    inputs: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
    drawing: Callable[[str, int, int], contextlib.AbstractContextManager[None]] | None = None,
    attribute: Callable[[nn.Module, str], Any] = getattr,
    given: Mapping[Value, torch.Tensor] | None = None,
) -> Any:
    """Computes a call on replicated values from the step's real inputs.

    Args:
        function: the torch function.
        args, kwargs: templates of its arguments.
        inputs: the tensor arguments of this microbatch, and the constants that it reads.
        drawing: seeds the generators for a draw; only where values may be random.
        attribute: returns a buffer; another than ``getattr`` while fakes are in its place.
        given: values that are there already.
    """
    known = {
        value: tensor.clone() if value.is_changed else tensor
        for value, tensor in (given or {}).items()
    }
    there = set(known)

    def run(node: Node) -> None:
        if node.kind in (NodeKind.INPUT, NodeKind.CONSTANT):
            read = inputs[node.target] if isinstance(node.target, int) else node.target
            known[node.outputs[0]] = read.clone() if node.outputs[0].is_changed else read
        elif node.kind is NodeKind.ATTRIBUTE:
            module, name = node.target
            read = attribute(module, name)
            # The step itself changes it, later.
            known[node.outputs[0]] = read.clone() if node.outputs[0].is_changed else read
        else:
            arguments = fill(node.args, Value, known.__getitem__)
            named = fill(node.kwargs, Value, known.__getitem__)
            seeded: Any = contextlib.nullcontext()
            if node.draw is not None and drawing is not None:
                seeded = drawing(*node.draw)
            with seeded, _under(node):
                result = node.target(*arguments, **named)
            for output in node.outputs:
                source: Any = output.source
                known[output] = (
                    known[source] if isinstance(source, Value) else follow(result, source)
                )

    # One after the other as in the script: what is changed in place had been read before.
    computed = sources(placeholders((args, kwargs), Value), there)
    for node in sorted(computed, key=lambda node: node.made):
        run(node)
    return function(*fill(args, Value, known.__getitem__), **fill(kwargs, Value, known.__getitem__))
