"""Computing replicated values from the real inputs of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.record.ir import Node, NodeKind, Value
from smdistributed.modelparallel.torch.tensors.nested import fill, follow, placeholders


def sources(values: Iterable[Value]) -> list[Node]:
    """Returns the nodes that values are computed from, in no order."""
    found: dict[Node, None] = {}
    pending = list(values)
    while pending:
        node = pending.pop().node
        if node in found:
            continue
        found[node] = None
        pending += node.inputs
        pending += [output.source for output in node.outputs if isinstance(output.source, Value)]
    return list(found)


def evaluate_replicated(
    function: Any,
    args: Any,
    kwargs: Any,
    inputs: Sequence[torch.Tensor] | Mapping[int, torch.Tensor],
    drawing: Callable[[str, int, int], contextlib.AbstractContextManager[None]] | None = None,
    attribute: Callable[[nn.Module, str], Any] = getattr,
) -> Any:
    """Computes a call on replicated values from the step's real inputs.

    Args:
        function: the torch function.
        args, kwargs: templates of its arguments.
        inputs: the tensor arguments of this microbatch, and the constants that it reads.
        drawing: seeds the generators for a draw; only where values may be random.
        attribute: returns a buffer; another than ``getattr`` while fakes are in its place.
    """
    known: dict[Value, torch.Tensor] = {}

    def run(node: Node) -> None:
        if node.kind in (NodeKind.INPUT, NodeKind.CONSTANT):
            given = inputs[node.target] if isinstance(node.target, int) else node.target
            known[node.outputs[0]] = given.clone() if node.outputs[0].is_changed else given
        elif node.kind is NodeKind.ATTRIBUTE:
            module, name = node.target
            given = attribute(module, name)
            # The step itself changes it, later.
            known[node.outputs[0]] = given.clone() if node.outputs[0].is_changed else given
        else:
            arguments = fill(node.args, Value, known.__getitem__)
            named = fill(node.kwargs, Value, known.__getitem__)
            seeded: Any = contextlib.nullcontext()
            if node.draw is not None and drawing is not None:
                seeded = drawing(*node.draw)
            with seeded:
                result = node.target(*arguments, **named)
            for output in node.outputs:
                source: Any = output.source
                known[output] = (
                    known[source] if isinstance(source, Value) else follow(result, source)
                )

    # One after the other as in the script: what is changed in place had been read before.
    for node in sorted(sources(placeholders((args, kwargs), Value)), key=lambda node: node.made):
        run(node)
    return function(*fill(args, Value, known.__getitem__), **fill(kwargs, Value, known.__getitem__))
