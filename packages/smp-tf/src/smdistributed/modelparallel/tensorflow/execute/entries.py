"""What the plan of a step has of the calls of one microbatch.

A call has a forward pass of each of its segments, and the backward passes of one request for its
gradients. What other requests of it compute, and requests that another call, or such a request,
waits for, are entries of their own: their passes go forward in the plan, as those of a call do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.tensorflow.execute.replay import Call, Request
from smdistributed.modelparallel.tensorflow.planning.segments import Pass

#: A request of a call: the places of both.
Asked = tuple[int, int]


class Origins(NamedTuple):
    """What tensors of the graph of a step come from.

    Attributes:
        results: as (place of a call, output).
        requests: whose gradients they come from.
    """

    results: set[tuple[int, int]]
    requests: set[Asked]


@dataclass(frozen=True)
class Entry:
    """A call with one of its requests, or a request that is apart from its call.

    Attributes:
        place: of the call among those of a microbatch.
        request: place of the request among those of the call; None if the call has none here.
        is_apart: whether this is the request alone.
        begin: number of its first segment in the plan.
        size: number of its segments.
    """

    place: int
    request: int | None
    is_apart: bool
    begin: int
    size: int

    def segment(self, one: int) -> int:
        """Returns the number in the plan of a segment of the call."""
        return self.begin + (self.size - 1 - one if self.is_apart else one)

    def segments(self) -> range:
        """Returns the numbers of all its segments."""
        return range(self.begin, self.begin + self.size)

    def request_of(self, calls: Sequence[Call]) -> Request | None:
        """Returns its request among the calls of some microbatch."""
        return None if self.request is None else calls[self.place].requests[self.request]

    def operation(self, calls: Sequence[Call], kind: Kind, segment: int) -> Any:
        """Returns what does a pass of the plan in this process, if something does.

        Args:
            calls: of some microbatch.
            kind: in the plan.
            segment: in the plan.
        """
        local = self.segment(segment - self.begin) - self.begin
        one: Pass = (Kind.BACKWARD if self.is_apart else kind, local)
        if one[0] is Kind.FORWARD:
            return calls[self.place].operations.get(one)
        request = self.request_of(calls)
        return None if request is None else request.operations.get(one)


def check_alike(microbatches: Sequence[Sequence[Call]]) -> None:
    """Raises unless all microbatches call models, and ask for gradients of them, as often."""
    first = [len(call.requests) for call in microbatches[0]]
    for number, calls in enumerate(microbatches):
        own = [len(call.requests) for call in calls]
        if len(own) != len(first):
            raise SMPError(
                f"a step function calls the model as often for each microbatch; it called it "
                f"{len(first)} times for microbatch 0 and {len(own)} times for microbatch "
                f"{number}: make the number of calls independent of the microbatch."
            )
        if own != first:
            raise SMPError(
                "a step function asks for gradients of a call as often for each microbatch; it "
                f"asked for those of its calls {first} times for microbatch 0 and {own} times for "
                f"microbatch {number}: make that independent of the microbatch."
            )


class Entries:
    """The entries of a microbatch, in an order that is the same on all processes of a pipeline.

    Args:
        calls: of the microbatch.

    Attributes:
        all: each after those that it waits for; calls as the body makes them.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._results = {call.results: place for place, call in enumerate(calls)}
        self._returned = {
            op: (place, number)
            for place, call in enumerate(calls)
            for number, request in enumerate(call.requests)
            for op in request.returned
        }
        self._of_inputs = [self.origins(call.inputs) for call in calls]
        self._of_requests = {
            (place, number): self.origins(request.given)
            for place, call in enumerate(calls)
            for number, request in enumerate(call.requests)
        }
        self._apart = self._find_apart()
        self.all = self._in_order()
        self._by_request = {
            (entry.place, entry.request): entry for entry in self.all if entry.request is not None
        }
        self._by_call = {entry.place: entry for entry in self.all if not entry.is_apart}

    def of_call(self, place: int) -> Entry:
        """Returns the entry of a call."""
        return self._by_call[place]

    def of_request(self, asked: Asked) -> Entry:
        """Returns the entry that has a request."""
        return self._by_request[asked]

    def origins(self, tensors: Iterable[Any]) -> Origins:
        """Returns what tensors of the step's graph come from."""
        found = Origins(set(), set())
        stack = [tensor for tensor in tensors if hasattr(tensor, "op")]
        seen: set[Any] = set()
        while stack:
            op = stack.pop().op
            if op in self._results:
                # One operation gives all results of a call, so that each of them waits for all.
                place = self._results[op]
                count = len(self._calls[place].local.plan.trace.outputs)
                found.results.update((place, output) for output in range(count))
            elif op in self._returned:
                found.requests.add(self._returned[op])
            elif op not in seen:
                seen.add(op)
                stack += list(op.inputs)
                stack += [earlier.outputs[0] for earlier in op.control_inputs if earlier.outputs]
        return found

    def _find_apart(self) -> set[Asked]:
        """Returns the requests that are not the backward passes of their calls."""
        apart = {
            (place, number)
            for place, call in enumerate(self._calls)
            for number in range(len(call.requests) - 1)
        }
        for origins in self._of_inputs:
            apart |= origins.requests
        size = -1
        while size < len(apart):
            size = len(apart)
            for (place, number), origins in self._of_requests.items():
                # Backward passes go from the last call to the first.
                is_apart = (place, number) in apart
                apart |= {each for each in origins.requests if is_apart or each[0] <= place}
        return apart

    def _in_order(self) -> list[Entry]:
        left = [
            *((place, None) for place in range(len(self._calls))),
            *sorted(self._apart),
        ]
        done: list[Entry] = []
        made: set[tuple[int, int | None]] = set()
        while left:
            one = next(each for each in left if self._waits_for(each) <= made)
            left.remove(one)
            made.add(one)
            place, request = one
            if request is None:
                request = len(self._calls[place].requests) - 1
                has_backward = request >= 0 and (place, request) not in self._apart
                request = request if has_backward else None
            begin = done[-1].segments().stop if done else 0
            size = len(self._calls[place].local.plan.partitions)
            done.append(Entry(place, request, one[1] is not None, begin, size))
        return done

    def _waits_for(self, one: tuple[int, int | None]) -> set[tuple[int, int | None]]:
        place, request = one
        if request is None:
            origins = self._of_inputs[place]
            before = {(place - 1, None)} if place else set()
        else:
            origins = self._of_requests[place, request]
            before = {(place, None)}
        return before | {(other, None) for other, _ in origins.results} | origins.requests
