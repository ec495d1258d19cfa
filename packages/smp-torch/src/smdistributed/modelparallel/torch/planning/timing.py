"""Timing operations on a device, each by itself, on numbers of no meaning.

No module of the user runs for it, nothing of the model has to be on the device, and nothing that
runs can see that it was done.

Source: smd_model_parallel_pytorch.rst, DistributedModel (trace_execution_times).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import statistics
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.torch.record.costs.meter import OF_WEIGHTS
from smdistributed.modelparallel.torch.record.costs.work import Operand, Operation
from smdistributed.modelparallel.torch.tensors.nested import fill, placeholders, tensors_in
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec

logger = logging.getLogger(__name__)

#: How long an operation is repeated at least, on a host.
_LEAST_SECONDS = 2e-3
#: On a GPU: calls in a graph, and how often that is replayed.
_CALLS, _REPLAYS = 8, 5


def measure(operations: Mapping[str, Operation], device: torch.device) -> dict[str, PassCosts]:
    """Returns the seconds that operations take on a device, by their names.

    What cannot be called by itself is taken to compute as fast as the others do on average.
    """
    found: dict[str, PassCosts] = {}
    failed: dict[str, Operation] = {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for name, operation in operations.items():
            try:
                with beside(device):
                    found[name] = _passes(operation, device)
            except Exception as error:
                failed[name] = operation
                logger.debug("%s is not timed: %r", name, error)
    flops = sum(operations[name].flops for name in found)
    seconds = sum(costs.forward for costs in found.values()) / flops if flops else 0.0
    for name, operation in failed.items():
        cost = seconds * operation.flops
        found[name] = PassCosts(cost, 2 * cost)
    return found


def _passes(operation: Operation, device: torch.device) -> PassCosts:
    def call() -> Any:
        return operation.function(*args, **kwargs)

    given = operation.args, operation.kwargs
    operands = list(placeholders(given, Operand))
    args, kwargs = fill(given, Operand, lambda operand: tensor_like(operand.spec, device))
    needed = [each for each in tensors_in((args, kwargs)) if each.requires_grad]
    sums = [
        torch.zeros_like(each) if operand.is_of_parameter else None
        for operand, each in zip(operands, tensors_in((args, kwargs)), strict=True)
        if each.requires_grad
    ]
    if operation.function._schema.is_mutable:
        for each in needed:  # a leaf that needs a gradient may not be changed
            each.requires_grad_(False)
        forward = seconds_of(call, device)
        return PassCosts(forward, forward if needed else 0.0)
    forward = seconds_of(call, device)
    results = [each for each in tensors_in(call()) if each.requires_grad]
    if not results:
        return PassCosts(forward)
    starts = [torch.ones_like(each) for each in results]

    def differentiate() -> None:
        gradients = torch.autograd.grad(
            results, needed, starts, retain_graph=True, allow_unused=True
        )
        for total, gradient in zip(sums, gradients, strict=True):
            if total is not None and gradient is not None:
                total.add_(gradient)

    backward = seconds_of(differentiate, device)
    weights = backward / 2 if operation.function._overloadpacket in OF_WEIGHTS else 0.0
    return PassCosts(forward, backward, weights)


def tensor_like(
    spec: TensorSpec, device: torch.device, *, is_product: bool = False
) -> torch.Tensor:
    """Returns a tensor: numbers from 0 to 1, indices and switches that are 0.

    Args:
        spec: of the tensor.
        device: that it is on.
        is_product: numbers are of both signs, which takes a GPU more power in a product.
    """
    place = spec.device if spec.device.type == "cpu" else device
    # Several places of a tensor may be one of its memory, which is filled as a whole.
    steps = zip(spec.shape, spec.stride, strict=True)
    extent = 0 if 0 in spec.shape else 1 + sum((size - 1) * step for size, step in steps)
    memory = torch.zeros(extent, dtype=spec.dtype, device=place)
    if (spec.dtype.is_floating_point or spec.dtype.is_complex) and spec.dtype.itemsize > 1:
        memory.normal_() if is_product else memory.uniform_(0, 1)
    return memory.as_strided(spec.shape, spec.stride).requires_grad_(spec.requires_grad)


def beside(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Returns a stream of its own, as graphs need one for both passes."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """Returns how long a call takes; on a GPU, where the host submits ahead, how long there."""
    if device.type == "cuda":
        try:
            return _seconds_in_a_graph(function)
        except RuntimeError as error:
            logger.debug("a call is timed with its host: %r", error)
            torch.cuda.synchronize()
    from torch.utils.benchmark import Timer  # a second to import, setuptools and distutils with it

    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=_LEAST_SECONDS).median


def _seconds_in_a_graph(function: Callable[[], Any]) -> float:
    for _ in range(2):  # what is chosen or made in a first call
        function()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # it takes no time, then
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(_CALLS):
                function()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]  # type: ignore[no-untyped-call]
    graph.replay()
    for mark in marks:
        mark.record()
        graph.replay()
    stream.synchronize()
    times: list[float] = [one.elapsed_time(other) for one, other in itertools.pairwise(marks)]
    return statistics.median(times) / 1e3 / _CALLS
