"""Compiled code, the gradients of whose weights can wait.

A compiled module has one backward pass, which computes the gradients of inputs and of weights at
once. Where the gradients of weights wait for idle moments, the graph of that pass, as the compiler
is given it, ends before the products that give them. What these multiply are results of the pass
in their place, so that the compiler leaves their memory alone, and the products are made later.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from smdistributed.modelparallel.torch.compat.private.compiled import (
    CompiledOtherwise,
    backend_of,
    backward_compilers_replaced,
    boxed,
    call_compiled,
    compiled_call,
    has_stance,
    leaves_of_this_pass,
    uses_cuda_graphs,
)
from smdistributed.modelparallel.torch.execute.waiting_products import add_product
from smdistributed.modelparallel.torch.execute.weight_gradients import (
    Waiting,
    waiting_for,
)
from smdistributed.modelparallel.torch.tensors.nested import tensors_in

logger = logging.getLogger(__name__)

aten = torch.ops.aten
#: What gives a matrix as it was given it.
_SAME = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default)
#: What a forward pass was given, where its backward pass is given it.
_GIVEN = re.compile(r"primals_(?P<number>[0-9]+)")
_CONVERSIONS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)


class WaitingCalls:
    """Compiled calls that let gradients of weights wait, in place of those of modules.

    Args:
        modules: what is called; those that are compiled count, however often that changes.
    """

    def __init__(self, modules: Iterable[Any]) -> None:
        self._modules = list(modules)
        self._made: dict[Any, CompiledOtherwise] = {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, these are made; where the user has chosen a stance, his own are."""
        made = [] if has_stance() else [self._of(each) for each in self._compiled()]
        with contextlib.ExitStack() as stack:
            for each in made:
                each.begin()
                stack.callback(each.end)
            yield

    def _compiled(self) -> Iterator[Any]:
        return (each for each in self._modules if compiled_call(each) is not None)

    def _of(self, module: Any) -> CompiledOtherwise:
        made = self._made.get(module)
        if made is None or not made.is_current:
            backend = Differentiating(backend_of(compiled_call(module)))
            made = self._made[module] = CompiledOtherwise(module, backend)
        return made


@dataclass
class Differentiating:
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
        reason = _reason_to_compute_at_once(graph, inputs)
        if not reason and uses_cuda_graphs(self.backend):
            reason = "runs as a CUDA graph, which computes into memory of its own"
        if reason:
            _tell(reason)
            return self.backend(graph, inputs, **options)
        compilers: list[Any] = []

        def replace(compiler: Callable[..., Any]) -> Callable[..., Any]:
            compilers.append(compiler)
            return functools.partial(_compile_backward, compiler)

        with backward_compilers_replaced(replace):
            compiled = self.backend(graph, inputs, **options)
        if not compilers and torch.is_grad_enabled():
            _tell("is not differentiated by the compiler")
        return compiled


@functools.cache
def _tell(reason: str) -> None:
    logger.info("compiled code %s: the gradients of its weights do not wait", reason)


def _reason_to_compute_at_once(graph: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Returns why the results of a graph's backward pass cannot be told apart; "" if they can."""
    values = [node.meta.get("example_value") for node in graph.graph.nodes]
    sizes = [size for each in tensors_in(values) for size in each.shape]
    if any(isinstance(each, torch.SymInt) for each in (*inputs, *values, *sizes)):
        return "has sizes that are not known when it is compiled"
    return ""


# Compiling


@dataclass(frozen=True)
class _Product:
    """A result of a backward pass that is the product of two matrices, or the sum of several.

    Attributes:
        position: among the results.
        node: the product.
        is_transposed: whether its transpose is in the result.
        dtype: of the result.
    """

    position: int
    node: fx.Node
    is_transposed: bool
    dtype: torch.dtype


def _compile_backward(
    compiler: Callable[..., Any], graph: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[[list[Any]], Any]:
    """Compiles a backward pass up to the products that give the gradients of weights.

    Args:
        compiler: of the user's backend.
        graph: of the backward pass; its results are the gradients of what the forward pass was
            given, in that order.
        inputs: stand-ins for its inputs.
    """
    end = next(node for node in graph.graph.nodes if node.op == "output")
    (results,) = end.args
    products: list[_Product] = []
    for position, node in enumerate(results):
        found = _products_behind(node) if isinstance(node, fx.Node) else []
        if not any(_is_only_read(factor, results) for each, _ in found for factor in each.args):
            products += [_Product(position, *each, node.meta["val"].dtype) for each in found]
    known = list(results)
    for each in products:
        known[each.position] = None
    factors = [factor for each in products for factor in each.node.args]
    end.args = ((*known, *factors),)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    compiled = compiler(graph, inputs)
    return boxed(functools.partial(_run, compiled, len(known), products))


def _products_behind(node: fx.Node, *, is_transposed: bool = False) -> list[tuple[fx.Node, bool]]:
    """Returns the products whose sum a node is, if nothing else becomes of them; else none.

    Returns:
        each with whether it is its transpose that counts.
    """
    while len(node.users) == 1 and node.op == "call_function":
        if node.target is aten.mm.default:
            return [(node, is_transposed)]
        before = node.all_input_nodes
        if node.target is aten.add.Tensor and len(before) == 2 and not node.kwargs:
            parts = [_products_behind(each, is_transposed=is_transposed) for each in before]
            return [*parts[0], *parts[1]] if all(parts) else []
        if len(before) != 1:
            return []
        if _transposes(node):
            is_transposed = not is_transposed
        elif not _keeps(node, before[0]):
            return []
        (node,) = before
    return []


def _is_only_read(factor: Any, results: Sequence[Any]) -> bool:
    """Whether a factor was given to the forward pass, and has no gradient.

    Then the weight's gradient is all that the pass computes; and modules write to their buffers.
    """
    while factor.op == "call_function" and (
        _transposes(factor)
        or (factor.all_input_nodes and _keeps(factor, factor.all_input_nodes[0]))
    ):
        factor = factor.all_input_nodes[0]
    given = _GIVEN.fullmatch(factor.name) if factor.op == "placeholder" else None
    return given is not None and results[int(given["number"]) - 1] is None


def _transposes(node: fx.Node) -> bool:
    if node.target is aten.t.default:
        return True
    if node.target is aten.permute.default:
        return list(node.args[1]) in ([1, 0], [-1, -2])  # type: ignore[arg-type]
    return node.target is aten.transpose.int and set(node.args[1:]) in ({0, 1}, {-1, -2})


def _keeps(node: fx.Node, before: fx.Node) -> bool:
    """Whether an operation gives the matrix that it is given, in another type maybe."""
    if node.target in _SAME:
        return bool(node.meta["val"].shape == before.meta["val"].shape)
    return node.target in _CONVERSIONS and node.meta["val"].device == before.meta["val"].device


# Running


class _WaitingProduct(Waiting):
    """Keeps the two matrices whose product is the gradient."""

    def add(self, *kept: torch.Tensor) -> None:
        """Adds the product.

        Args:
            kept: the matrices.
        """
        assert self.weight is not None
        add_product(self.weight, *kept)


def _run(
    compiled: Callable[..., Any], num_results: int, products: Sequence[_Product], args: list[Any]
) -> list[Any]:
    """Runs a backward pass; products whose gradients may wait are put off."""
    results = call_compiled(compiled, args)
    gradients, factors = list(results[:num_results]), iter(results[num_results:])
    leaves = leaves_of_this_pass()
    for each in products:
        one, other = next(factors), next(factors)
        leaf = leaves[each.position] if len(leaves) == num_results else None
        here = waiting_for(leaf) if leaf is not None else None
        if here is not None:
            both = (other.t(), one.t()) if each.is_transposed else (one, other)
            here.put_off(_WaitingProduct(leaf, None, *both))
        else:
            product = one.mm(other).to(each.dtype)
            product = product.t() if each.is_transposed else product
            known = gradients[each.position]
            gradients[each.position] = product if known is None else known + product
    return gradients
