"""How the samples of an epoch are dealt out to replicas, of which there may be fewer after a loss.

Source: an addition to the documented API; the order is that of torch's DistributedSampler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.torch.api.slot import slot


class ElasticSampler(DistributedSampler[Any]):
    """Deals out an epoch as ``DistributedSampler`` does, and goes on with any number of replicas.

    Its state counts the samples that all replicas have had of the epoch, so the rest can be dealt
    out to others. The replicas take steps together: the state of one is that of all.

    Args:
        dataset: of a known length.
        num_replicas: among which samples are dealt out; by default ``smp.dp_size()``.
        rank: of this replica; by default ``smp.dp_rank()``.
        shuffle: whether each epoch has an order of its own.
        seed: of that order; the same on all ranks.
        drop_last: leave out the last samples, fewer than replicas; else the first ones are given
            again, so that each replica has as many.

    Raises:
        NotInitializedError: before ``smp.init``, without ``num_replicas`` and ``rank``.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None:
            num_replicas = slot.get().topology.dp_size
        if rank is None:
            rank = slot.get().coordinates.dp_rank
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        #: What all replicas had of the epoch before this pass, and what this one has had in it.
        self._had, self._taken = 0, 0
        self._is_resumed = False

    def __iter__(self) -> Iterator[int]:
        """Yields the indices of this replica for the rest of the epoch."""
        if not self._is_resumed:
            self._had = 0
        self._is_resumed, self._taken = False, 0
        left = self._order()[self._had :]
        beyond = len(left) % self.num_replicas
        if beyond and self.drop_last:
            del left[-beyond:]
        elif beyond:
            order = self._order()
            while len(left) % self.num_replicas:
                left += order[: -len(left) % self.num_replicas]
        for index in left[self.rank :: self.num_replicas]:
            self._taken += 1
            yield index

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch; that of a state which was loaded goes on where it was."""
        if epoch != self.epoch:
            self._is_resumed, self._had, self._taken = False, 0, 0
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Returns the epoch, and how many samples all replicas together have had of it."""
        had = self._had + self._taken * self.num_replicas
        return {"epoch": self.epoch, "had": min(had, len(self.dataset))}  # type: ignore[arg-type]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the next pass go on from a state, whatever the number of replicas was.

        Raises:
            ConfigError: it is the state of another sampler, which counts otherwise.
        """
        if state.keys() != {"epoch", "had"}:
            raise ConfigError(
                "the state of an ElasticSampler has 'epoch' and 'had'; received "
                f"{', '.join(map(repr, state)) or 'nothing'}: load what its state_dict() returned."
            )
        self.epoch, self._had, self._taken = state["epoch"], state["had"], 0
        self._is_resumed = True

    def _order(self) -> list[int]:
        """Returns all of the epoch, as one replica has it."""
        whole: DistributedSampler[Any] = DistributedSampler(
            self.dataset, 1, 0, self.shuffle, self.seed
        )
        whole.set_epoch(self.epoch)
        return list(whole)
