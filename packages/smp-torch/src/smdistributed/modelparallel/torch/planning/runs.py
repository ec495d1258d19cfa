"""Runs: what a segment computes between two modules, where that is compiled as one function.

The functions of torch that the step function and split modules call launch kernels of their own: a
loss of logits in half precision reads and writes them six times. As one function the compiler makes
two kernels of it, one a pass, that read them once.

A run has only calls that the compiler and the library see alike: no random numbers, whose keys are
the library's, no writes to what was there before, no objects with state, and no products with a
weight, whose gradients may wait. What a gradient is asked of comes to it from outside: within a
compiled function there is none. Nor has a run what no gradient comes to: a function with several
results gives zeros to what only that is made of, where autograd gives nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from smdistributed.modelparallel.common.planning.pass_costs import OPERATIONS_A_BYTE
from smdistributed.modelparallel.torch.planning.late_values import LateValues
from smdistributed.modelparallel.torch.record.costs.work import Work
from smdistributed.modelparallel.torch.record.ir import Graph, Node, NodeKind, Value
from smdistributed.modelparallel.torch.state.carried import Carried
from smdistributed.modelparallel.torch.tensors.nested import placeholders

#: A function that is worth compiling launches so many kernels as it is.
_LEAST_KERNELS = 2
#: What a run only reads, and what the first call of it may find there already.
_GIVEN = (NodeKind.INPUT, NodeKind.CONSTANT, NodeKind.ATTRIBUTE)


def apart_from_runs(graph: Graph, late: LateValues) -> set[Value]:
    """Returns the values whose gradients a script asks for, and those to which none comes."""
    asking = (node for node in graph.nodes if node.target is torch.autograd.grad)
    asked = {*late.gradients, *(value for node in asking for value in node.inputs)}
    return asked | _without_gradients(graph) if graph.roots else asked


def _without_gradients(graph: Graph) -> set[Value]:
    """Returns the values that could have a gradient, and of which no loss is made."""
    gets = set(graph.roots)
    for node in reversed(graph.nodes):
        made = {*node.outputs, *node.changes}
        if not made.isdisjoint(gets) and any(value.requires_grad for value in made):
            gets.update(node.inputs)
    every = (value for node in graph.nodes for value in node.outputs)
    return {value for value in every if value.requires_grad and value not in gets}


def runs_of(nodes: Sequence[Node], apart: set[Value]) -> Iterator[tuple[list[Node], bool]]:
    """Divides nodes into runs, and into what lies between them.

    Args:
        nodes: of a segment, in order.
        apart: values that no run makes; see ``apart_from_runs``.

    Yields:
        nodes that follow each other, and whether they are a run. What a run is given comes before
        it, wherever it stood in it.
    """
    between: list[Node] = []
    run: list[Node] = []
    for node in [*nodes, None]:
        if node is not None and run and node.kind in _GIVEN:
            between.append(node)
        elif node is not None and _fits(node, run, apart):
            run.append(node)
        else:
            if sum(each.work.kernels for each in run) >= _LEAST_KERNELS:
                yield between, False
                yield run, True
                between = []
            else:
                between = sorted([*between, *run], key=lambda each: each.index)
            run = []
            if node is not None:
                (run if _fits(node, run, apart) else between).append(node)
    yield between, False


def _fits(node: Node, run: Sequence[Node], apart: set[Value]) -> bool:
    """Whether a node can be the next of a run."""
    if node.kind is not NodeKind.CALL or not node.outputs or node.region is not None:
        return False
    if run and (node.grad_enabled, node.autocast) != (run[0].grad_enabled, run[0].autocast):
        return False
    return (
        node.draw is None
        and not (node.changes or node.switches)
        and node.default_dtype is torch.float32
        and apart.isdisjoint(node.outputs)
        and not any(value.is_changed for value in (*node.inputs, *node.outputs))
        and not any(isinstance(value.source, Value) for value in node.outputs)
        and not any(True for _ in placeholders((node.args, node.kwargs), Carried))
        and node.target is not torch.autograd.grad
        and node.beside is None
        and not node.work.weight_flops
    )


def work_of_run(run: Sequence[Node], later: set[Value]) -> Work:
    """Returns what a run does as one function: only what goes in and comes out is moved.

    Args:
        run: its nodes.
        later: the values that something after it reads.
    """
    work = sum((each.work for each in run), Work())
    made = {value for node in run for value in node.outputs}
    outside = {value for node in run for value in node.inputs} - made | made & later
    moved = OPERATIONS_A_BYTE * sum(value.num_bytes for value in outside)
    return Work(work.flops - work.moved + min(work.moved, moved), work.weight_flops)
