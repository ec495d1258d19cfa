"""Computing replicated values from the real inputs of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch.pipeline.ir import Node, NodeKind, Value
from smdistributed.modelparallel.torch.pipeline.structure import fill, follow


def evaluate_replicated(
    function: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor]
) -> Any:
    """Computes a call on replicated values from the step's real inputs.

    Args:
        function: the torch function.
        args, kwargs: templates of its arguments.
        inputs: the tensor arguments of this microbatch, in order.
    """
    known: dict[Value, torch.Tensor] = {}

    def evaluate(value: Value) -> torch.Tensor:
        if value not in known:
            run(value.node)
        return known[value]

    def run(node: Node) -> None:
        if node.kind is NodeKind.INPUT:
            known[node.outputs[0]] = inputs[node.target]
        elif node.kind is NodeKind.CONSTANT:
            known[node.outputs[0]] = node.target
        elif node.kind is NodeKind.ATTRIBUTE:
            module, name = node.target
            known[node.outputs[0]] = getattr(module, name)
        else:
            result = node.target(
                *fill(node.args, Value, evaluate), **fill(node.kwargs, Value, evaluate)
            )
            for output in node.outputs:
                source = output.source
                known[output] = (
                    evaluate(source) if isinstance(source, Value) else follow(result, source)
                )

    return function(*fill(args, Value, evaluate), **fill(kwargs, Value, evaluate))
