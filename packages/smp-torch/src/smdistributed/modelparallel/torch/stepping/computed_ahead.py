"""Computing a microbatch ahead of a step, part by part.

Each rank computes the parts that lie on its partition, one after the other, and hands on what
others need. What a part gives is kept for the parts that follow. An error of a part is raised on
every rank.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of
from smdistributed.modelparallel.torch.record.failure import Failure
from smdistributed.modelparallel.torch.record.ir import Value
from smdistributed.modelparallel.torch.record.questions.ahead import depends_on_values
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.state.carried import CarriedObjects
from smdistributed.modelparallel.torch.state.switches import without_autocast
from smdistributed.modelparallel.torch.stepping.question_plans import Part
from smdistributed.modelparallel.torch.stepping.state_ahead import StateAhead, places_of
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import slices_as_they_are

_HOST = torch.device("cpu")


def _apart_from(written: Iterable[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Returns what a part gives, or a copy where it shows state, which is put back in a moment."""
    own = storage_of(tensor)
    return tensor.clone() if any(storage_of(each) == own for each in written) else tensor


class Given(NamedTuple):
    """What a microbatch is given.

    Attributes:
        inputs: its tensor arguments, as far as this rank has them.
        constants: what it reads besides.
        where: who asks for what it computes, for messages.
    """

    inputs: Sequence[torch.Tensor]
    constants: Sequence[torch.Tensor]
    where: str


class Together:
    """The ranks that compute ahead of a step.

    Args:
        runtime: the state of the library in this process.
        shares: they are those of the pipeline; else this one computes alone.

    Attributes:
        shares: the same.
    """

    def __init__(self, runtime: TorchRuntime, *, shares: bool) -> None:
        self._runtime = runtime
        self.shares = shares

    def tell(self, mine: Any) -> list[Any]:
        """Returns what all have, each of which has come to the same place."""
        if not self.shares:
            return [mine]
        runtime = self._runtime
        members = runtime.topology.members(CommGroup.PP_GROUP, runtime.rank)
        with runtime.communicator.reach.only(members, "in a question about an activation"):
            everyones: list[Any] = runtime.communicator.allgather(mine, CommGroup.PP_GROUP)
        return everyones

    @contextlib.contextmanager
    def failing(self) -> Iterator[list[Any]]:
        """Yields a list; an error is put there, to be raised by all."""
        found: list[Any] = []
        try:
            yield found
        except Exception as error:
            if not self.shares:
                raise
            found[:] = [Failure.of(error)]

    def agreed(self, found: list[Any], rank: int) -> Any:
        """Returns what a rank has found; raises if one has failed."""
        everyones = self.tell(found)
        for each in everyones:
            if each and isinstance(each[0], Failure):
                raise each[0].error()
        own = everyones[rank] if self.shares else found
        return own[0] if own else None


class ComputedAhead:
    """What is computed ahead of the step in one microbatch.

    Args:
        runtime: the state of the library in this process.
        microbatch: its number in the step.
        together: with whom.
        state: what modules find, and leave.
        calls: of modules that draw random numbers, in what was computed.

    Attributes:
        together: the same.
        num_done: how many nodes were computed.
        is_over: nobody can go on from there.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        microbatch: int,
        together: Together,
        state: StateAhead,
        calls: collections.Counter[tuple[str, int]],
    ) -> None:
        self._runtime = runtime
        self._pp_rank = runtime.coordinates.pp_rank
        self._microbatch = microbatch
        self.together = together
        self._state = state
        self._calls = calls
        self.num_done = 0
        self.is_over = False
        #: By the index of its value, what this rank has.
        self._tensors: dict[int, torch.Tensor] = {}
        self._carried = CarriedObjects()
        #: The tensor arguments of the microbatch that it has.
        self._inputs: dict[int, torch.Tensor] = {}
        #: Values, and arguments, that a rank other than their own has got.
        self._handed: set[tuple[int, int]] = set()
        self._handed_inputs: set[tuple[int, int]] = set()

    def go_on(self, parts: Sequence[Part], num_nodes: int, given: Given) -> None:
        """Computes what is left of some nodes.

        Args:
            parts: what is left.
            num_nodes: how many nodes there are.
            given: what the microbatch is given.

        Raises:
            Exception: of a module, on all ranks.
        """
        for part in parts:
            with self.together.failing() as found:
                tensors = self.run(part, given)
                if tensors is not None:
                    self._tensors.update((value.index, each) for value, each in tensors.items())
            self.together.agreed(found, part.nodes.rank)
        self.num_done = max(self.num_done, num_nodes)

    def let_go(self) -> None:
        """Keeps no tensor: nobody will go on from here."""
        self.is_over = True
        self._tensors, self._inputs = {}, {}
        self._carried.clear()

    def run(self, part: Part, given: Given) -> dict[Value, torch.Tensor] | None:
        """Hands a part what it reads; returns what it gives, on the rank that computes it."""
        if self._pp_rank == 0:
            self._inputs = dict(enumerate(given.inputs))
        self._hand(part)
        if part.program is None:
            return None
        runtime = self._runtime
        runtime.tensor_group.ahead(part.together)
        inputs = [*map(self._inputs.get, range(len(given.inputs))), *given.constants]
        arguments = [self._tensors[value.index] for value in part.nodes.inputs]
        devices = tuple(dict.fromkeys(("cpu", runtime.device.type)))
        is_placed = self.together.shares
        with (
            slices_as_they_are(),
            runtime.random.computing_ahead(self._calls, self._microbatch),
            without_autocast(devices),
            self._state.found(part.nodes, given.where) as written,
            contextlib.nullcontext() if is_placed else self._on_device(part, written, given.where),
        ):
            results = [
                _apart_from(written.values(), each)
                for each in part.program.run(inputs, self._carried, *arguments)
            ]
        return dict(zip(part.nodes.outputs, results, strict=True))

    @contextlib.contextmanager
    def _on_device(
        self, part: Part, written: Mapping[int, torch.Tensor], where: str
    ) -> Iterator[None]:
        """Has copies of parameters on the device: those of models without a partition are not.

        Args:
            part: that reads them.
            written: those that it may write to, by identity.
            where: who asks, for messages.

        Raises:
            UnsupportedError: they have no values yet.
        """
        replaced = []
        for table, name in places_of(part.nodes):
            tensor = table[name]
            if tensor is None:
                continue
            if tensor.is_meta:
                raise depends_on_values(where, "parameters of its model have no values yet")
            copy = tensor.detach().to(self._runtime.device)
            replaced.append((table, name, tensor, copy))
            table[name] = copy
        try:
            yield
        finally:
            for table, name, tensor, copy in replaced:
                if table[name] is copy:  # else the module has put another one there
                    table[name] = tensor
                if id(tensor) in written:
                    tensor.detach().copy_(copy)

    def _hand(self, part: Part) -> None:
        """Sends a part what it reads and its rank has not."""
        rank = part.nodes.rank
        for value in part.inputs:
            position = value.node.target
            if rank and (position, rank) not in self._handed_inputs:
                self._handed_inputs.add((position, rank))
                self._pass_on(value, position, self._inputs, 0, rank)
        for value in part.nodes.inputs:
            if value.node.rank != rank and (value.index, rank) not in self._handed:
                self._handed.add((value.index, rank))
                self._pass_on(value, value.index, self._tensors, value.node.rank, rank)

    def _pass_on(
        self, value: Value, key: int, tensors: dict[int, torch.Tensor], source: int, target: int
    ) -> None:
        # By way of the host: a first question comes before ranks have connected their devices.
        links = self._runtime.links
        if self._pp_rank == source:
            links.send(value.wire(tensors[key].detach()).to(_HOST), target).wait()
        elif self._pp_rank == target:
            arrived = links.receive(value.wire_buffer(_HOST), source).wait()
            tensors[key] = value.from_wire(arrived).to(value.device)
