"""Communication of Python objects between ranks: the primitives of the documented API.

All calls are synchronous. Collectives gather at the first rank of the group and go out from there;
each message carries the name of its call, so that ranks which make different calls on one group
learn it instead of exchanging nonsense.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from smdistributed.modelparallel.common.comm.reach import Reach
from smdistributed.modelparallel.common.comm.seal import SECRET_VARIABLE, Seal, SealError
from smdistributed.modelparallel.common.comm.transport import (
    PeersMissingError,
    Posted,
    Transport,
)
from smdistributed.modelparallel.common.errors import CommError
from smdistributed.modelparallel.common.groups import CommGroup, RankType
from smdistributed.modelparallel.common.names_of_ranks import listed
from smdistributed.modelparallel.common.topology import Topology
from smdistributed.modelparallel.common.whereabouts import Activity, Exchange

_P2P_CHANNEL = 0
_GROUP_CHANNELS = {group: 1 + index for index, group in enumerate(CommGroup)}
_NEWS_CHANNELS = {group: 1 + len(CommGroup) + index for index, group in enumerate(CommGroup)}
#: A group's first rank gives up so long before those that wait for its answer: it knows who is
#: missing.
_LATER_SECONDS = 2.0
#: How calls begin that send to others.
_SENDING = ("send", "broadcast", "tell")
#: Messages on their way that nobody waits for.
_MOST_TOLD = 64


@dataclass(frozen=True)
class Codec:
    """How objects become bytes; a framework brings its own for its tensors."""

    dumps: Callable[[object], bytes] = pickle.dumps
    loads: Callable[[bytes | memoryview], Any] = pickle.loads


class Communicator:
    """Sends and receives objects over the groups of a topology.

    Args:
        transport: the way between the processes.
        topology: ranks and groups.
        timeout_seconds: how long a call waits for its partners.
        codec: how objects become bytes.
        seal: how messages prove that they are this job's; by default with the secret that the
            launcher left in the environment.

    Attributes:
        reach: with whom this rank can exchange at present. ``tell`` and ``hear``, by which ranks
            run one after the other, do not ask it.

    Source: smd_model_parallel_common_api.rst, Communication API.
    """

    def __init__(
        self,
        transport: Transport,
        topology: Topology,
        timeout_seconds: float,
        codec: Codec | None = None,
        seal: Seal | None = None,
    ) -> None:
        self._transport = transport
        self._topology = topology
        self._timeout_seconds = timeout_seconds
        self._codec = codec or Codec()
        self.reach = Reach()
        self._seal = seal or Seal.of(os.environ)
        self._before_calls: Callable[[str, Sequence[int]], None] | None = None
        self._calls = dict.fromkeys(CommGroup, 0)
        self._told: deque[tuple[str, Posted]] = deque()
        #: What this rank has opened and nobody is known to have joined, and its number.
        self._unjoined: dict[CommGroup, tuple[str, int]] = {}
        #: The call that this rank waits in, and when it began to.
        self._waiting: tuple[str, float] | None = None
        #: The call of a group that this rank has made last.
        self._group_call: tuple[str, CommGroup] | None = None

    def activities(self) -> list[Activity]:
        """Returns the call that this rank waits in, if it is in one; for any thread."""
        waiting, missing = self._waiting, self._transport.awaited
        if waiting is None:
            return []
        call, began = waiting
        what = f"{call}, waits for {listed(sorted(missing))}" if missing else call
        return [Activity.since(began, what, self._exchange_of(call, missing))]

    def _exchange_of(self, call: str, missing: Collection[int]) -> Exchange | None:
        """Returns the exchange that a call is, if it is one of a group or of two ranks."""
        if self._group_call is not None and self._group_call[0] == call:
            group = self._group_call[1]
            return Exchange(call, self._members(group), self._calls[group])
        if len(missing) != 1:
            return None
        ranks = tuple(sorted({self._transport.rank, *missing}))
        return Exchange("objects", ranks, sends=call.startswith(_SENDING))

    def before_calls(self, function: Callable[[str, Sequence[int]], None]) -> None:
        """Has a function called before each collective, with its words and its global ranks."""
        self._before_calls = function

    def send(self, obj: object, dest_rank: int, rank_type: RankType) -> None:
        """Sends a picklable object to one process; returns when that process has received it.

        Two processes that send to each other first wait for each other: one must receive.

        Args:
            obj: any picklable object.
            dest_rank: the receiver, read as ``rank_type`` says.
            rank_type: over which of the caller's groups ``dest_rank`` counts.

        Raises:
            CommError: ``obj`` cannot be pickled (nothing was sent), or the receiver died or did
                not receive in time.
            ValueError: ``dest_rank`` is out of range or the caller itself.
        """
        call = f"send(..., {dest_rank}, {_name(rank_type, RankType)})"
        peer = self._peer(call, dest_rank, rank_type)
        self._send(call, self._encode(call, obj), [peer], _P2P_CHANNEL)

    def recv_from(self, src_rank: int, rank_type: RankType) -> Any:
        """Receives one object from a process: what its ``send`` or ``broadcast`` sent.

        Args:
            src_rank: the sender, read as ``rank_type`` says.
            rank_type: over which of the caller's groups ``src_rank`` counts.

        Returns:
            The object. Messages of one sender arrive in sending order.

        Raises:
            CommError: the sender died or did not send in time.
            ValueError: ``src_rank`` is out of range or the caller itself.
        """
        call = f"recv_from({src_rank}, {_name(rank_type, RankType)})"
        peer = self._peer(call, src_rank, rank_type)
        return self._codec.loads(self._receive(call, [peer], _P2P_CHANNEL)[0])

    def broadcast(self, obj: object, group: CommGroup) -> None:
        """Sends an object to all other processes of a group, each of which calls ``recv_from``.

        Called by the sender only. Returns when every other member has received.

        Raises:
            CommError: ``obj`` cannot be pickled (nothing was sent), or a member died or did not
                receive in time.
        """
        call = f"broadcast(..., {_name(group, CommGroup)})"
        others = [rank for rank in self._members(group) if rank != self._transport.rank]
        self.reach.check(call, others)
        self._send(call, self._encode(call, obj), others, _P2P_CHANNEL)

    def allgather(
        self,
        obj: object,
        group: CommGroup,
        purpose: str = "",
        timeout_seconds: float | None = None,
    ) -> list[Any]:
        """Gives every member the objects of all members.

        Collective: every rank of ``group``.

        Args:
            obj: any picklable object.
            group: whose members take part.
            purpose: what for: calls for different purposes do not meet.
            timeout_seconds: how long it may take, if not as long as any call.

        Returns:
            A list; item i is the object of the group's rank i.

        Raises:
            CommError: ``obj`` cannot be pickled (nothing was sent), a member died or did not come
                in time, or a member makes another call on this group.
        """
        call = f"allgather(..., {_name(group, CommGroup)}{purpose and f', for {purpose}'})"
        payload = self._encode(call, obj)
        items = self._exchange(call, payload, group, timeout_seconds=timeout_seconds)
        return [self._codec.loads(item) for item in items]

    def gather(self, obj: object, group: CommGroup) -> list[Any] | None:
        """Gives the group's first member the objects of all members, and the others None.

        Collective: every rank of ``group``.

        Raises:
            CommError: as ``allgather``.
        """
        call = f"gather(..., {_name(group, CommGroup)})"
        payloads = self._exchange(call, self._encode(call, obj), group, to_first=True)
        if self._transport.rank != self._members(group)[0]:
            return None
        return [self._codec.loads(item) for item in payloads]

    def barrier(self, group: CommGroup = CommGroup.WORLD) -> None:
        """Returns once every member of the caller's group has called it.

        Collective: every rank of ``group``.

        Raises:
            CommError: a member died or did not come in time, or makes another call on this group.
        """
        self._exchange(f"barrier({_name(group, CommGroup)})", b"", group)

    def from_first(self, obj: object, group: CommGroup) -> Any:
        """Gives every member the object of the group's first rank.

        Collective: every rank of ``group``; the objects of the others do not count.

        Raises:
            CommError: as ``allgather``.
        """
        call = f"from_first(..., {_name(group, CommGroup)})"
        is_first = self._transport.rank == self._members(group)[0]
        payload = self._encode(call, obj) if is_first else b""
        first = self._exchange(call, payload, group)[0]
        return obj if is_first else self._codec.loads(first)

    def open(self, obj: object, group: CommGroup, purpose: str) -> None:
        """Gives all other members an object, each when it comes, and does not wait for them.

        Called by the group's first rank alone; the others call ``join`` for the same purpose.
        Whether they did shows in the first rank's next call on this group.

        Raises:
            CommError: as ``allgather``, of this call and of the one before.
        """
        call = f"{purpose}, which {_name(group, CommGroup)} makes together"
        payload = self._encode(call, obj)
        self.settle(group)
        self._calls[group] += 1
        members, number = self._members(group), self._calls[group]
        if len(members) > 1:
            self._unjoined[group] = call, number
            given = pickle.dumps((call, number, payload))
            self._start(call, given, members[1:], _GROUP_CHANNELS[group])

    def join(self, group: CommGroup, purpose: str) -> Any:
        """Returns what the group's first rank has opened, or will; see ``open``.

        Raises:
            CommError: as ``allgather``.
        """
        call = f"{purpose}, which {_name(group, CommGroup)} makes together"
        self._calls[group] += 1
        self._group_call = call, group
        number, first = self._calls[group], self._members(group)[0]
        self._start(call, pickle.dumps((call, number, b"")), [first], _GROUP_CHANNELS[group])
        return self._codec.loads(self._answer(call, number, group))

    def settle(self, group: CommGroup, timeout_seconds: float | None = None) -> None:
        """Makes sure that all members have joined what this rank has opened last, if anything.

        Args:
            group: over which.
            timeout_seconds: how long that may take, if not as long as any call.

        Raises:
            CommError: one has not come in time, or makes another call on this group.
        """
        opened = self._unjoined.pop(group, None)
        if opened is None:
            return
        others = self._members(group)[1:]
        arrived = self._receive(opened[0], others, _GROUP_CHANNELS[group], timeout_seconds)
        if problem := self._difference(*opened, group, [pickle.loads(item) for item in arrived]):
            self._fail(problem, ())

    def tell(self, obj: object, group: CommGroup) -> None:
        """Gives all other members one more object, and does not wait for them.

        Called by the group's first rank alone; the others call ``hear`` as often.

        Raises:
            CommError: ``obj`` cannot be pickled (nothing was sent), or a member did not receive
                this or what it was told before.
        """
        call = f"tell(..., {_name(group, CommGroup)})"
        payload = self._encode(call, obj)
        self._start(call, payload, self._members(group)[1:], _NEWS_CHANNELS[group])

    def hear(self, group: CommGroup) -> Any:
        """Returns the next object that the group's first rank tells; see ``tell``.

        Raises:
            CommError: it died or did not tell in time.
        """
        call = f"hear({_name(group, CommGroup)})"
        first = self._members(group)[0]
        return self._codec.loads(self._receive(call, [first], _NEWS_CHANNELS[group])[0])

    def _exchange(
        self,
        call: str,
        payload: bytes,
        group: CommGroup,
        *,
        to_first: bool = False,
        timeout_seconds: float | None = None,
    ) -> Sequence[bytes]:
        """Collects one byte string of every member at every member, or at the first alone."""
        members = self._members(group)
        self.reach.check(call, members)
        if len(members) == 1:
            self._calls[group] += 1
            return [payload]
        if self._before_calls is not None:
            self._before_calls(call, members)
        self.settle(group)
        self._calls[group] += 1
        self._group_call = call, group
        channel, number = _GROUP_CHANNELS[group], self._calls[group]
        mine = pickle.dumps((call, number, payload))
        first, others = members[0], members[1:]
        if self._transport.rank != first:
            # The first rank may be in a call that waits for nobody, and says so in its answer.
            posted = self._post(mine, [first], channel)
            answer: list[bytes] = self._answer(call, number, group, timeout_seconds)
            self._wait(call, posted)
            return answer
        received = self._receive(call, others, channel, timeout_seconds)
        arrived = [pickle.loads(item) for item in received]
        if problem := self._difference(call, number, group, arrived):
            self._send(call, pickle.dumps(problem), others, channel)
            self._fail(problem, ())
        payloads = [payload, *(item for _, _, item in arrived)]
        answered = (call, number, [] if to_first else payloads)
        self._send(call, pickle.dumps(answered), others, channel)
        return payloads

    def _answer(
        self, call: str, number: int, group: CommGroup, timeout_seconds: float | None = None
    ) -> Any:
        """Returns what the group's first rank has for those who make a call with it."""
        first = self._members(group)[0]
        patience = (timeout_seconds or self._timeout_seconds) + _LATER_SECONDS
        (received,) = self._receive(call, [first], _GROUP_CHANNELS[group], patience)
        answer = pickle.loads(received)
        if isinstance(answer, str):
            self._fail(answer, ())
        its_call, its_number, given = answer
        if (its_call, its_number) != (call, number):
            mine = self._transport.rank, call, number
            self._fail(_different(group, (first, its_call, its_number), mine), ())
        return given

    def _difference(
        self, call: str, number: int, group: CommGroup, arrived: Sequence[tuple[str, int, bytes]]
    ) -> str:
        """Returns what is wrong with the calls of the others; empty if they make the same."""
        first, *others = self._members(group)
        for rank, (its_call, its_number, _) in zip(others, arrived, strict=True):
            if (its_call, its_number) != (call, number):
                return _different(group, (first, call, number), (rank, its_call, its_number))
        return ""

    def _start(self, call: str, payload: bytes, ranks: Sequence[int], channel: int) -> None:
        """Sends, and waits for it only if it has to, or is far ahead."""
        if ranks:
            self._told.append((call, self._post(payload, ranks, channel)))
        most = _MOST_TOLD if len(payload) <= self._transport.largest_alone else 0
        while len(self._told) > most:
            self._wait(*self._told.popleft())

    def _send(self, call: str, payload: bytes, ranks: Sequence[int], channel: int) -> None:
        if ranks:
            self._wait(call, self._post(payload, ranks, channel))

    def _post(self, payload: bytes, ranks: Sequence[int], channel: int) -> Posted:
        sealed = self._seal.close(payload, self._transport.rank, channel)
        return self._transport.post(sealed, ranks, channel)

    def _wait(self, call: str, posted: Posted) -> None:
        with self._waiting_in(call):
            posted.wait(self._timeout_seconds)

    def _receive(
        self,
        call: str,
        ranks: Sequence[int],
        channel: int,
        timeout_seconds: float | None = None,
    ) -> list[memoryview]:
        timeout_seconds = timeout_seconds or self._timeout_seconds
        with self._waiting_in(call):
            messages = self._transport.receive(ranks, channel, timeout_seconds)
        return [
            self._opened(call, message, rank, channel)
            for rank, message in zip(ranks, messages, strict=True)
        ]

    @contextlib.contextmanager
    def _waiting_in(self, call: str) -> Iterator[None]:
        self._waiting = call, time.monotonic()
        try:
            yield
        except PeersMissingError as error:
            self._fail_missing(call, error)
        finally:
            self._waiting = None

    def _opened(self, call: str, message: bytes | bytearray, rank: int, channel: int) -> memoryview:
        try:
            return self._seal.open(message, rank, channel)
        except SealError as error:
            self._fail(
                f"{call}: a message must prove that it comes from a rank of this job; that from "
                f"rank {rank} was {error}. It was not read. Give all processes the same "
                f"{SECRET_VARIABLE}, or start the job with smprun, which does.",
                (),
            )

    def _fail_missing(self, call: str, error: PeersMissingError) -> NoReturn:
        ranks = listed(sorted(error.missing_ranks))
        self._fail(
            f"{call} cannot complete: {ranks} {error.reason}. Every process that the call "
            "concerns must make its matching call; look at that rank's own output for the cause.",
            error.missing_ranks,
        )

    def _fail(self, problem: str, missing_ranks: Sequence[int]) -> NoReturn:
        raise CommError(
            f"rank {self._transport.rank}: {problem}",
            rank=self._transport.rank,
            missing_ranks=missing_ranks,
        )

    def _encode(self, call: str, obj: object) -> bytes:
        try:
            return self._codec.dumps(obj)
        except Exception as error:
            raise CommError(
                f"{call} needs an object that can be pickled; received {type(obj).__name__}: "
                f"{error}. Nothing was sent.",
                rank=self._transport.rank,
            ) from error

    def _members(self, group: CommGroup) -> tuple[int, ...]:
        _name(group, CommGroup)
        return self._topology.members(group, self._transport.rank)

    def _peer(self, call: str, rank: int, rank_type: RankType) -> int:
        members = self._members(rank_type.group)
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"{call}: the rank must be an int; received {type(rank).__name__}.")
        if not 0 <= rank < len(members):
            raise ValueError(
                f"{call}: the rank must be in 0 .. {len(members) - 1}, the ranks of the caller's "
                f"{rank_type.group.name}; received {rank}."
            )
        if members[rank] == self._transport.rank:
            raise ValueError(
                f"{call}: the rank is the caller itself, which would wait for itself for ever; "
                "keep the object instead."
            )
        self.reach.check(call, [members[rank]])
        return members[rank]


def _different(group: CommGroup, first: tuple[int, str, int], other: tuple[int, str, int]) -> str:
    (rank, call, number), (other_rank, other_call, other_number) = first, other
    return (
        f"the ranks of {group.name} make different calls: rank {rank} is in {call} (call {number} "
        f"on this group), rank {other_rank} in {other_call} (call {other_number}). Every member "
        "must make the same calls in the same order."
    )


def _name(value: object, kind: type[CommGroup] | type[RankType]) -> str:
    """Returns the name of an enum member, or raises if ``value`` is none of ``kind``."""
    if not isinstance(value, kind):
        choices = ", ".join(f"smp.{kind.__name__}.{member.name}" for member in kind)
        raise TypeError(f"expected one of {choices}; received {value!r}.")
    return value.name
