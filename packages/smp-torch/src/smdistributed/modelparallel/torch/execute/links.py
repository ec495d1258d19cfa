"""Point-to-point transfers of tensors between the ranks of one pipeline.

Both ends know the order of all transfers between two ranks from the plan, so a transfer carries no
header and needs no negotiation. GPUs of one host lay messages into each other's memory
(``mailboxes.py``). On NCCL each direction of a pair has a communicator of its own:
transfers of one communicator run in one order, and the two directions must not wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.planning.schedule import Action
from smdistributed.modelparallel.common.whereabouts import Activity
from smdistributed.modelparallel.torch.collectives.symmetric_memory import MakeMemory
from smdistributed.modelparallel.torch.execute.mailboxes import Laying, Mailboxes, Taking
from smdistributed.modelparallel.torch.execute.peers import RECEIVING, SENDING, Blaming, Peers
from smdistributed.modelparallel.torch.execute.room import Rooms

#: Transfers of a pair of ranks are in one order, so they need no telling apart.
_TAG = 0


class Links:
    """The transfers of this process.

    Args:
        pipelines: of each pipeline of the job, the global ranks by pp_rank.
        members: this process's pipeline.
        pp_rank: this process's place in it.
        groups: torch's process groups; that of the pipeline is looked up at each use, so that
            the runtime alone keeps it alive and can close its connections.
        device: where the tensors live.
        timeout: how long a transfer waits for its peer.
        peers: who is blamed when a transfer fails.
        readable: returns what makes memory that the ranks of the pipeline share, if they can.
            Collective: the pipeline.
    """

    def __init__(
        self,
        pipelines: Sequence[tuple[int, ...]],
        members: tuple[int, ...],
        pp_rank: int,
        groups: Mapping[CommGroup, dist.ProcessGroup],
        device: torch.device,
        timeout: timedelta,
        peers: Peers,
        readable: Callable[[], MakeMemory | None],
    ) -> None:
        self._pipelines = pipelines
        self._members = members
        self._pp_rank = pp_rank
        self._groups = groups
        self._device = device
        self._timeout = timeout
        self._peers = peers
        self._readable = readable
        #: None as long as it is not known whether there can be any.
        self._mailboxes: Mailboxes | Literal[False] | None = None
        #: On GPUs, by (source, target): the communicator, and the other one's rank in it.
        self._directions: dict[tuple[int, int], tuple[dist.ProcessGroup, int]] = {}
        self._connected: set[tuple[int, int]] = set()
        self._action: tuple[Action, float] | None = None
        self._upwards: dist.ProcessGroup
        self._downwards: dist.ProcessGroup
        # torch numbers the members of a group in ascending order.
        self._rank_of = [sorted(members).index(member) for member in members]

    def begin(self, action: Action | None) -> None:
        """Takes note of the action that comes next, which it may have to wait for."""
        self._action = None if action is None else (action, time.monotonic())

    def activities(self) -> list[Activity]:
        """Returns the action of a step that this process is at, if any; for any thread."""
        if (at := self._action) is None:
            return []
        action, began = at
        name = action.kind.name.lower().replace("_", " ")
        what = f"action {action}: {name} of microbatch {action.microbatch}"
        return [Activity.since(began, what)]

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._groups[CommGroup.PP_GROUP]

    def connect(self, directions: Iterable[tuple[int, int]], rooms: Rooms) -> None:
        """Makes what (source, target) pairs of pp_ranks will use.

        Collective: WORLD in the first call, the pipeline later; the same on all its ranks.

        Args:
            directions: pairs that send something.
            rooms: of those that send messages of an itinerary.
        """
        self._make_communicators([*directions, *rooms])
        if not rooms:
            return
        if self._mailboxes is None:
            make = self._readable()
            self._mailboxes = make is not None and Mailboxes(
                make, self._rank_of, self._pp_rank, self._device
            )
        if self._mailboxes:
            self._mailboxes.make_room(rooms)

    def _make_communicators(self, directions: Iterable[tuple[int, int]]) -> None:
        """Both directions of a pair get one: a step that only evaluates may come first."""
        wanted = {way for one, other in directions for way in ((one, other), (other, one))}
        if self._device.type != "cuda" or wanted <= self._connected:
            return
        if not self._connected:
            self._make_groups(wanted)
        for source, target in sorted(wanted - self._connected):
            if self._pp_rank in (source, target):
                pair = (self._members[source], self._members[target])
                other = target if source == self._pp_rank else source
                with self._peers.blaming(pair, "connecting"):
                    group = self._upwards if source < target else self._downwards
                    self._directions[source, target] = group, self._rank_of[other]
                    self._greet(group, pair)
        self._connected |= wanted

    def _make_groups(self, wanted: set[tuple[int, int]]) -> None:
        """Makes a communicator for each direction, and what later ones are made of. Collective.

        Later calls may come from one pipeline alone, where no group can be made; a group of the
        whole pipeline connects two of its ranks when they exchange something.
        """
        # torch names a group by how many there are: all ranks must make all groups, in one order.
        for source, target in sorted(wanted):
            for members in self._pipelines:
                pair = (members[source], members[target])
                with self._peers.blaming(pair, "connecting"):
                    group = self._new_group(pair)
                    if members == self._members:
                        other = target if source == self._pp_rank else source
                        rank = int(members[other] == max(pair))
                        self._directions[source, target] = group, rank
                        self._greet(group, pair)
        for members in self._pipelines:
            with self._peers.blaming(members, "connecting"):
                groups = self._new_group(members), self._new_group(members)
                if members == self._members:
                    self._upwards, self._downwards = groups
        self._connected |= wanted

    def _new_group(self, members: Sequence[int]) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            list(members), timeout=self._timeout, backend="nccl"
        )
        return group

    def _greet(self, group: dist.ProcessGroup, pair: tuple[int, int]) -> None:
        """Sends something: NCCL connects at the first transfer, which must be in one order too."""
        probe = torch.zeros(1, device=self._device)
        if dist.get_rank() == pair[0]:
            work = dist.isend(probe, pair[1], group=group)
        elif dist.get_rank() == pair[1]:
            work = dist.irecv(probe, pair[0], group=group)
        else:
            return
        assert work is not None
        work.wait()

    def send(self, tensor: torch.Tensor, target: int) -> Transfer:
        """Starts sending a tensor to a pp_rank.

        Shape: any, as the receiver expects it; dims in the order of memory.
        """
        tensor = tensor.contiguous()
        group, rank = self._way(tensor, (self._pp_rank, target), target)
        blaming = self._peers.blaming((self._members[target],), SENDING)
        with blaming:
            work = group.send([_real(tensor)], rank, _TAG)
        return Transfer(tensor, work, blaming)

    def receive(self, tensor: torch.Tensor, source: int) -> Transfer:
        """Starts receiving into a tensor from a pp_rank.

        Shape: that of what the sender sends.
        """
        group, rank = self._way(tensor, (source, self._pp_rank), source)
        blaming = self._peers.blaming((self._members[source],), RECEIVING)
        with blaming:
            work = group.recv([_real(tensor)], rank, _TAG)
        return Transfer(tensor, work, blaming)

    @property
    def lays_messages(self) -> bool:
        """Whether messages are written at once when they are needed, and leave as soon as sent.

        Known from ``connect`` on; else sender and receiver wait for each other.
        """
        return bool(self._mailboxes)

    def send_message(self, tensor: torch.Tensor, target: int) -> Transfer | Laying:
        """Starts sending a message of an itinerary, for which ``connect`` has made room.

        Shape: any, as the receiver expects it; dims in the order of memory.
        """
        if self._mailboxes and self._mailboxes.takes_to(target, tensor):
            return self._mailboxes.send(tensor.contiguous(), target)
        return self.send(tensor, target)

    def receive_message(self, tensor: torch.Tensor, source: int) -> Transfer | Taking:
        """Starts receiving a message of an itinerary.

        Shape: that of what the sender sends.
        """
        if self._mailboxes and self._mailboxes.takes_from(source, tensor):
            return self._mailboxes.receive(tensor, source)
        return self.receive(tensor, source)

    def _way(
        self, tensor: torch.Tensor, direction: tuple[int, int], peer: int
    ) -> tuple[dist.ProcessGroup, int]:
        """Returns the communicator of a direction, and the peer's rank in it.

        Tensors on the host go by the common one. The group is used itself: ``torch.distributed``'s
        functions look up and check, at each of the many transfers, what does not change.
        """
        if tensor.is_cuda and (way := self._directions.get(direction)):
            return way
        return self._group, self._rank_of[peer]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Gives every rank of the pipeline the tensor of one pp_rank. Collective: PP_GROUP.

        Shape: the same on every rank.
        """
        if len(self._members) == 1:
            return
        with self._peers.blaming(self._members, "sharing a result with"):
            dist.broadcast(tensor, self._members[source], group=self._group)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Transfer:
    """A transfer under way; keeps its tensor alive until it is done."""

    __slots__ = ("_blaming", "_work", "tensor")

    def __init__(self, tensor: torch.Tensor, work: dist.Work | None, blaming: Blaming) -> None:
        self.tensor = tensor
        self._work = work
        self._blaming = blaming

    @property
    def is_done(self) -> bool:
        """Whether it has completed; never waits."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> torch.Tensor:
        """Makes the tensor usable: waits here on the CPU, on the stream on a GPU.

        Raises:
            CommError: the peer died or did not take part in time.
        """
        if self._work is not None:
            with self._blaming:
                self._work.wait()
            self._work = None
        return self.tensor
