"""Compiled code in pieces, between which products with weights can wait.

A compiled module has one backward pass, which computes the gradients of inputs and of weights at
once. Where the gradients of weights wait for idle moments, a graph that the compiler has captured
is cut at its products with weights: the pieces between are compiled as the user chose, and the
products are those of ``weight_gradients``.

A graph stays whole where pieces could give other numbers: pieces run in another order than the
graph's nodes, and each draws random numbers and replaces what it writes to by itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from smdistributed.modelparallel.torch.compat.private.compiled import (
    backend_of,
    backend_replaced,
    compile_pieces,
    compiled_call,
    uses_cuda_graphs,
)
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of, version_of
from smdistributed.modelparallel.torch.execute.waiting_layers import that_can_wait
from smdistributed.modelparallel.torch.execute.waiting_products import plain_addmm, plain_linear
from smdistributed.modelparallel.torch.execute.weight_gradients import is_putting_off
from smdistributed.modelparallel.torch.record.costs import Meter
from smdistributed.modelparallel.torch.record.nested import tensors_in

logger = logging.getLogger(__name__)

#: Where the weight is among the arguments of a product. Convolutions stay where they are: compilers
#: choose the layout of all that lies around them.
_POSITION_OF_WEIGHT: dict[Any, int] = {plain_linear: 1, plain_addmm: 2}


def in_pieces(module: Any) -> contextlib.AbstractContextManager[None] | None:
    """Returns what lets a module's compiled call run in pieces; None if it is not compiled."""
    call = compiled_call(module)
    return None if call is None else _Compiling(InPieces(backend_of(call)))


class _Compiling:
    """Has what is compiled inside compiled in pieces, if gradients of weights wait.

    Args:
        backend: what compiles.
    """

    def __init__(self, backend: InPieces) -> None:
        self._backend = backend
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        if is_putting_off():
            self._stack.enter_context(backend_replaced(self._backend))

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


@dataclass
class InPieces:
    """A backend of ``torch.compile``. Two are equal, for its cache, if they compile alike.

    Args:
        backend: the user's.
    """

    backend: Callable[..., Any]

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        """Compiles a graph.

        Args:
            graph: as it was captured, of functions of torch.
            inputs: stand-ins for its inputs.
            options: for the user's backend.

        Returns:
            what runs it.
        """
        products = [node for node in graph.graph.nodes if _is_product(node)]
        if not products:
            return self.backend(graph, inputs, **options)
        levels = _levels(graph, products)
        reason = _reason_to_stay_whole(graph, inputs, levels)
        if not reason and uses_cuda_graphs(self.backend):
            reason = "runs as a CUDA graph"
        if reason:
            _tell(reason)
            return self.backend(graph, inputs, **options)
        return compile_pieces(
            graph,
            functools.partial(self.backend, **options) if options else self.backend,
            inputs,
            levels,
            {node: that_can_wait(node.target) for node in products},
        )


@functools.cache
def _tell(reason: str) -> None:
    logger.info(
        "compiled code %s, so it stays whole: the gradients of its weights do not wait", reason
    )


def _is_product(node: fx.Node) -> bool:
    """Whether a node multiplies with a weight that is an input of the graph."""
    position = _POSITION_OF_WEIGHT.get(node.target) if node.op == "call_function" else None
    if position is None or len(node.args) <= position or node.kwargs:
        return False
    weight = node.args[position]
    return isinstance(weight, fx.Node) and weight.op == "placeholder"


def _levels(graph: fx.GraphModule, products: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Returns by node how many products with weights come one after another before it.

    Each piece is the nodes of one level, and runs before that level's products.
    """
    among = set(products)
    levels: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            known = [(each, levels[each]) for each in node.all_input_nodes if each in levels]
            levels[node] = max((level + (each in among) for each, level in known), default=0)
    return levels


def _reason_to_stay_whole(
    graph: fx.GraphModule, inputs: Sequence[Any], levels: dict[fx.Node, int]
) -> str:
    """Returns what a graph does that pieces of it might not do alike; "" if nothing."""
    values = [node.meta.get("example_value") for node in graph.graph.nodes]
    sizes = [size for each in tensors_in(values) for size in each.shape]
    if any(isinstance(each, torch.SymInt) for each in (*inputs, *values, *sizes)):
        return "has sizes that are not known when it is compiled"
    if any(isinstance(each, fx.GraphModule) for each in graph.children()):
        return "contains graphs of functions, as those of checkpoints are"
    trial = _Trial(graph, levels)
    with Meter() as meter:
        trial.run(*[_copy(each) for each in inputs])
    if meter.random_draws:
        return "draws random numbers"
    given = tensors_in(inputs)
    if trial.writes and len({storage_of(each) for each in given}) < len(given):
        return "changes a tensor in place, and is given tensors that share memory"
    return trial.reason


def _copy(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


class _Trial(fx.Interpreter):
    """Runs a graph on stand-ins, and looks at what its nodes do besides what they return.

    Args:
        graph: to run.
        levels: of its nodes.

    """

    def __init__(self, graph: fx.GraphModule, levels: dict[fx.Node, int]) -> None:
        # Values are kept, so that no memory is taken for another's.
        super().__init__(graph, garbage_collect_values=False)
        self._levels = levels
        self._changes_state = False
        #: By memory, the nodes that make, read or write it, in order; and how many of them there
        #: were at the last write.
        self._users: dict[int, list[fx.Node]] = defaultdict(list)
        self._num_at_write: dict[int, int] = {}

    @property
    def writes(self) -> bool:
        """Whether a tensor was changed in place."""
        return bool(self._num_at_write)

    @property
    def reason(self) -> str:
        """What forbids cutting the graph; "" if nothing."""
        if self._changes_state:
            return "changes what torch does with tensors, as autocast and no_grad do"
        if not all(self._is_written_in_one_piece(memory) for memory in self._num_at_write):
            return "changes a tensor in place that is used on both sides of a cut"
        return ""

    def _is_written_in_one_piece(self, memory: int) -> bool:
        """Whether one piece has all users until the last write, and those after it run later."""
        number, users = self._num_at_write[memory], self._users[memory]
        level = self._levels[users[number - 1]]
        return all(
            self._levels[each] == level and not _is_product(each) for each in users[:number]
        ) and all(self._levels[each] >= level for each in users[number:])

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node.

        Args:
            n: the node.

        Returns:
            what it gives.
        """
        given = tensors_in(self.fetch_args_kwargs_from_env(n))
        versions = [version_of(each) for each in given]
        result = super().run_node(n)
        if n in self._levels:
            made = tensors_in(result)
            self._changes_state |= not given and not made
            for memory in {storage_of(each) for each in (*given, *made)}:
                self._users[memory].append(n)
            for each, version in zip(given, versions, strict=True):
                if version_of(each) != version:
                    self._num_at_write[storage_of(each)] = len(self._users[storage_of(each)])
        return result
