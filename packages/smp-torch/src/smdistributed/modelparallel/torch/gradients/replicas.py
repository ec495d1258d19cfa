"""The replicas of a partition, also while some of them have run out of batches."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.execute.peers import Blaming
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime


class Exchange(enum.IntEnum):
    """What the replicas are about to do together."""

    NOTHING = 0
    BUFFERS = 1
    GRADIENTS = 2
    GRADIENTS_OF_SLICES = 3


#: Does a replica's part of an exchange after its last batch; gets the dp_ranks that have batches.
Shadow = Callable[[Exchange, Sequence[int]], None]


class Replicas:
    """The data-parallel ranks that hold the same partition of one model.

    Args:
        runtime: the state of the library in this process.
        kind: the group that they are.

    Attributes:
        size: how many there are.
        own: which of them this is.
        members: their global ranks.
        group: torch's group of them; None in a world of one.
        device: where they communicate.
    """

    def __init__(self, runtime: TorchRuntime, kind: CommGroup = CommGroup.DP_CP_GROUP) -> None:
        self.members = runtime.topology.members(kind, runtime.rank)
        self.own = self.members.index(runtime.rank)
        self._joinable: _JoinableReplicas | None = None
        self._peers = runtime.peers
        self.size = len(self.members)
        self.group = runtime.process_groups.get(kind)
        self.device = runtime.device
        self._divides_by_active = False

    @property
    def divides_by_active(self) -> bool:
        """Whether gradients are averaged over those that still have batches, not over all."""
        return self._divides_by_active

    @property
    def reduces(self) -> Exchange:
        """What they do together when they reduce gradients."""
        return Exchange.GRADIENTS

    def broadcast(self, tensors: Iterable[torch.Tensor], source: int) -> None:
        """Gives all replicas the tensors of one. Collective: DP_GROUP.

        Args:
            tensors: the same shapes on every replica.
            source: its dp_rank.
        """
        if self.size > 1:
            with self.blaming("sharing parameters and buffers with"):
                for tensor in map(_without_repeats, tensors):
                    # Torch writes one number after the other, whatever the strides are.
                    flat = tensor.contiguous()
                    dist.broadcast(flat, self.members[source], group=self.group)
                    if flat.data_ptr() != tensor.data_ptr():
                        tensor.copy_(flat)

    @torch.no_grad()
    def broadcast_flat(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Gives all replicas the values of one, in few messages. Collective: the replicas.

        Args:
            tensors: the same shapes and types on every replica.
            source: which of them.
        """
        if self.size == 1:
            return
        for dtype in dict.fromkeys(each.dtype for each in tensors):
            chosen = [each for each in tensors if each.dtype is dtype]
            flat = torch.cat([each.detach().reshape(-1) for each in chosen])
            with self.blaming("sharing updated parameters with"):
                dist.broadcast(flat, self.members[source], group=self.group)
            if source != self.own:
                parts = torch.split(flat, [each.numel() for each in chosen])
                for tensor, part in zip(chosen, parts, strict=True):
                    tensor.copy_(part.view_as(tensor))

    def start_mean(self, flat: torch.Tensor, target: int) -> torch.futures.Future[torch.Tensor]:
        """Starts a mean over the replicas that one of them gets. Collective: the replicas.

        Args:
            flat: where it arrives; on the others it holds nothing of use afterwards.
            target: which of them.
        """
        flat.div_(self.size)
        work = dist.reduce(flat, self.members[target], group=self.group, async_op=True)
        assert work is not None
        arrived: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: flat)
        return arrived

    def blaming(self, doing: str) -> Blaming:
        """Inside, errors of torch become errors that name the missing replica's ranks."""
        return self._peers.blaming(self.members, doing)

    @property
    def is_joining(self) -> bool:
        """Whether replicas may have run out of batches."""
        return self._joinable is not None

    @contextlib.contextmanager
    def join(
        self,
        shadow: Shadow,
        adopt: Callable[[int], None],
        *,
        divide_by_initial_world_size: bool,
        throw_on_early_termination: bool,
    ) -> Iterator[None]:
        """Lets replicas make different numbers of steps inside. Collective: DP_GROUP.

        Args:
            shadow: called for each exchange of the others once the own batches are used up.
            adopt: called at the end with the dp_rank whose state everybody takes.
            divide_by_initial_world_size: average over all replicas; see ``divides_by_active``.
            throw_on_early_termination: raise everywhere as soon as one has no more batches.
        """
        self._joinable = _JoinableReplicas(self, shadow, adopt)
        self._divides_by_active = not divide_by_initial_world_size
        try:
            with Join([self._joinable], True, throw_on_early_termination):
                yield
        finally:
            self._joinable = None
            self._divides_by_active = False

    def announce(self, exchange: Exchange) -> Sequence[int]:
        """Tells replicas without batches what comes; returns the dp_ranks that have some.

        Collective: DP_GROUP, in a join; else local.
        """
        if self._joinable is None:
            return range(self.size)
        with self.blaming("joining"):
            Join.notify_join_context(self._joinable)
        return self.agree(exchange)[1]

    def agree(self, exchange: Exchange | None) -> tuple[Exchange, Sequence[int]]:
        """Returns the exchange that comes and the dp_ranks that named it. Collective: DP_GROUP.

        Args:
            exchange: the own word; None without batches.
        """
        votes = torch.full((self.size,), -1, dtype=torch.int32, device=self.device)
        if exchange is not None:
            votes[self.own] = exchange
        with self.blaming("joining"):
            dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.group)
            words = votes.tolist()
        return Exchange(max(words)), [rank for rank, word in enumerate(words) if word >= 0]


class ReplicasOfSlices(Replicas):
    """The ranks that hold the same slices of a partition: some of the data-parallel ranks.

    Args:
        runtime: the state of the library in this process.
        everyone: all data-parallel ranks, which decide together who has batches.
    """

    def __init__(self, runtime: TorchRuntime, everyone: Replicas) -> None:
        super().__init__(runtime, CommGroup.RDP_CP_GROUP)
        self._everyone = everyone
        members = runtime.topology.members(CommGroup.DP_CP_GROUP, runtime.rank)
        self._places = [members.index(rank) for rank in self.members]
        self._rdp_ranks = [runtime.topology.coordinates(rank).rdp_cp_rank for rank in members]

    @property
    def reduces(self) -> Exchange:
        """What they do together when they reduce gradients."""
        return Exchange.GRADIENTS_OF_SLICES

    @property
    def is_joining(self) -> bool:
        """Whether replicas may have run out of batches."""
        return self._everyone.is_joining

    @property
    def divides_by_active(self) -> bool:
        """Whether gradients are averaged over those that still have batches, not over all."""
        return self._everyone.divides_by_active

    def announce(self, exchange: Exchange) -> Sequence[int]:
        """See ``Replicas.announce``."""
        return self.among(self._everyone.announce(exchange))

    def among(self, dp_ranks: Sequence[int]) -> Sequence[int]:
        """Returns which of these replicas are among some data-parallel ranks."""
        return [place for place, dp_rank in enumerate(self._places) if dp_rank in dp_ranks]

    def beside(self, dp_rank: int) -> int:
        """Returns the replica that is in the tensor-parallel group of a data-parallel rank."""
        return self._rdp_ranks[dp_rank]


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of a tensor each once, where it is one that was expanded."""
    data = tensor.data
    for dim, (size, stride) in enumerate(zip(data.shape, data.stride(), strict=True)):
        if size > 1 and stride == 0:
            data = data.narrow(dim, 0, 1)
    return data


class _JoinableReplicas(Joinable):
    """What torch's Join sees."""

    def __init__(self, replicas: Replicas, shadow: Shadow, adopt: Callable[[int], None]) -> None:
        super().__init__()
        self._replicas = replicas
        self._shadow = shadow
        self._adopt = adopt

    def join_hook(self, **kwargs: object) -> JoinHook:
        return _WithoutBatches(self._replicas, self._shadow, self._adopt)

    @property
    def join_device(self) -> torch.device:
        return self._replicas.device

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        return self._replicas.group


class _WithoutBatches(JoinHook):
    """What torch's Join calls while others have batches, and at the end."""

    def __init__(self, replicas: Replicas, shadow: Shadow, adopt: Callable[[int], None]) -> None:
        self._replicas = replicas
        self._shadow = shadow
        self._adopt = adopt

    def main_hook(self) -> None:
        self._shadow(*self._replicas.agree(None))

    def post_hook(self, is_last_joiner: bool) -> None:
        _, last = self._replicas.agree(Exchange.NOTHING if is_last_joiner else None)
        self._adopt(last[0])
