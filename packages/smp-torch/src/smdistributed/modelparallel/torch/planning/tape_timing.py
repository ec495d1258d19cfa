"""How long the operations of a recorded microbatch take on a device, under its own load.

They run in their order on numbers of no meaning; no module of the user does, and nothing of the
model has to be on the device. A host is asked for the time of each. On a GPU each kind of operation
is timed by itself, and as one that computes a whole step is hotter than one that computes eight
products, and finds less in its caches, these times are stretched to what passes take as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.common.planning.pass_tape import BackwardTape, Span
from smdistributed.modelparallel.common.search.devices import device_like
from smdistributed.modelparallel.torch.planning.timing import beside, seconds_of, tensor_like
from smdistributed.modelparallel.torch.record.costs.tape_writer import TapeWriter
from smdistributed.modelparallel.torch.record.costs.work import Operand, Operation, Operations
from smdistributed.modelparallel.torch.tensors.nested import fill, placeholders
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec

logger = logging.getLogger(__name__)

#: How long both passes are repeated on a GPU: its clock follows its power in some 100 ms.
_LOADED_SECONDS = 0.5
#: How often they are repeated on a host, and how long at most.
_ROUNDS, _MOST_SECONDS = 5, 10.0

_Call = Callable[[], Any]
#: The names of the operations of each pass, in their order.
_Passes = Sequence[Sequence[str]]


@dataclass(frozen=True)
class TimedTape:
    """The seconds of the operations of a microbatch.

    Attributes:
        forward: of each operation of the forward pass.
        backward: of each operation of the backward pass, with the sum of what it gives to the
            gradient of a parameter.
        of_weights: those of the latter which give the gradient of a weight.
        tape: of the backward pass.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    of_weights: frozenset[int]
    tape: BackwardTape

    def costs(self, spans: Iterable[Span]) -> PassCosts:
        """Returns what the passes of a part of the microbatch take.

        Args:
            spans: its operations, which do not overlap.
        """
        spans = list(spans)
        later = self.tape.within(spans)
        return PassCosts(
            sum(sum(self.forward[start:end]) for start, end in spans),
            sum(self.backward[each] for each in later),
            sum(self.backward[each] for each in later if each in self.of_weights),
        )


def timed_tape(
    writer: TapeWriter, operations: Operations, device: torch.device
) -> TimedTape | None:
    """Times a microbatch; returns None if its backward pass is not known, or cannot run by itself.

    Args:
        writer: has taken note of its operations.
        operations: has their kinds.
        device: to time them on.
    """
    tape = writer.backward.tape()
    later = (operations.known[name] for name in writer.backward.names if name)
    if not tape.positions or any(map(_is_given_bytes, later)):
        return None
    sums = {at: _name_of_sum(spec, operations) for at, spec in writer.backward.sums}
    backward_names = [
        [*filter(None, (name, sums.get(at, "")))] for at, name in enumerate(writer.backward.names)
    ]
    names = [[name] if name else [] for name in writer.names], backward_names
    passes = [[name for each in one for name in each] for one in names]
    with _at_rest(device):
        calls = _Calls(operations.known, device)
        measured = _on_a_gpu if device.type == "cuda" else _on_a_host
        seconds = measured(calls, passes)
    forward, backward = (
        [sum(known[name] for name in each) for each in one]
        for known, one in zip(seconds, names, strict=True)
    )
    of_weights = {at for at in sums if _is_product(operations, writer.backward.names[at])}
    return TimedTape(forward, backward, frozenset(of_weights), tape)


def kind_of(device: torch.device) -> str:
    """Returns the name of the kind of a device; "" if plans have no figures of its kind."""
    if device.type == "cpu":
        return "cpu"
    try:
        return device_like(torch.cuda.get_device_name(device)).name
    except ConfigError:
        return ""


@contextlib.contextmanager
def _at_rest(device: torch.device) -> Any:
    """Inside, a host computes on one core, as a process of a job does, and no generator moves."""
    num_threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        if device.type == "cpu":
            torch.set_num_threads(1)
        try:
            with beside(device):
                yield
        finally:
            torch.set_num_threads(num_threads)


def _is_given_bytes(operation: Operation) -> bool:
    """Whether an operation reads what another one has noted for it, as recurrent kernels do.

    With numbers of no meaning in its place it would end the process.
    """
    given = placeholders((operation.args, operation.kwargs), Operand)
    return any(operand.spec.dtype is torch.uint8 for operand in given)


def _is_product(operations: Operations, name: str) -> bool:
    return bool(name) and operations.known[name].products > 0


def _name_of_sum(spec: TensorSpec, operations: Operations) -> str:
    """Returns the name of the operation that adds a gradient to that of a parameter."""
    operand = Operand(spec._replace(requires_grad=False), is_of_parameter=False)
    name = f"sum of gradients {operand}"
    add = torch.ops.aten.add_.Tensor
    operations.known.setdefault(name, Operation(add, (operand, operand), {}, 0, 0))
    return name


class _Calls:
    """Calls of the kinds of operations of a microbatch.

    Args:
        known: the operations, by name.
        device: to call them on.

    Attributes:
        of: returns that of a name.
    """

    def __init__(self, known: Mapping[str, Operation], device: torch.device) -> None:
        self._known = known
        self.device = device
        #: Operations of one kind of operand share it.
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {}
        self.of = functools.cache(self._of)

    def completed(self, seconds: Mapping[str, float], passes: _Passes) -> dict[str, float]:
        """Returns the seconds of all operations: what has none computes as fast as the others."""
        flops = sum(self._known[name].flops for name in seconds)
        rate = sum(seconds.values()) / flops if flops else 0.0
        left = {name: rate * self._known[name].flops for each in passes for name in each}
        return {**left, **seconds}

    def _of(self, name: str) -> _Call:
        operation = self._known[name]
        count = itertools.count()
        kind = operation.products > 0, operation.function._schema.is_mutable

        def tensor(operand: Operand) -> torch.Tensor:
            spec = operand.spec._replace(requires_grad=False)
            key = (*kind, next(count), spec)
            if key not in self._tensors:
                is_product, _ = kind
                self._tensors[key] = tensor_like(spec, self.device, is_product=is_product)
            return self._tensors[key]

        args, kwargs = fill((operation.args, operation.kwargs), Operand, tensor)
        return functools.partial(operation.function, *args, **kwargs)


def _on_a_host(calls: _Calls, passes: _Passes) -> list[dict[str, float]]:
    """Returns for each pass the seconds of its operations, by name."""
    taken: list[dict[str, list[float]]] = [{} for _ in passes]
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        for names, found in zip(passes, taken, strict=True):
            for name in names:
                if time.perf_counter() - began > _MOST_SECONDS and name in found:
                    continue
                with contextlib.suppress(Exception):  # what cannot be called by itself
                    call = calls.of(name)
                    before = time.thread_time()  # other processes may use the core besides
                    call()
                    found.setdefault(name, []).append(time.thread_time() - before)
    medians = [{name: statistics.median(each) for name, each in one.items()} for one in taken]
    return [calls.completed(each, passes) for each in medians]


def _on_a_gpu(calls: _Calls, passes: _Passes) -> list[dict[str, float]]:
    """Returns for each pass the seconds of its operations, by name."""
    alone: dict[str, float] = {}
    for name in sorted({name for each in passes for name in each}):
        try:
            alone[name] = seconds_of(calls.of(name), calls.device)
        except Exception as error:
            logger.debug("%s is not timed: %r", name, error)
    together = [[name for name in each if name in alone] for each in passes]
    sums = [sum(alone[name] for name in each) for each in together]
    try:
        taken = _in_turns([[calls.of(name) for name in each] for each in together])
    except RuntimeError as error:  # what waits for the device cannot be captured
        logger.debug("passes are not timed as a whole: %r", error)
        taken = sums
    known = calls.completed(alone, passes)
    return [
        {name: seconds * whole / each for name, seconds in known.items()} if each else known
        for whole, each in zip(taken, sums, strict=True)
    ]


def _in_turns(passes: Sequence[Sequence[_Call]]) -> list[float]:
    """Returns what passes take on a GPU that computes them in turns, for a while."""
    stream = torch.cuda.current_stream()
    graphs = []
    for calls in passes:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graphs.append(graph)
    rounds: list[list[float]] = []
    while sum(map(sum, rounds)) < _LOADED_SECONDS:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for graph, mark in zip(graphs, marks[1:], strict=True):
            graph.replay()
            mark.record()
        stream.synchronize()
        rounds.append([one.elapsed_time(other) / 1e3 for one, other in itertools.pairwise(marks)])
    late = rounds[len(rounds) // 2 :]
    return [statistics.median(column) for column in zip(*late, strict=True)]
