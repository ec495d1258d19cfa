"""What a rank of a job holds at its fullest, by kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from smdistributed.modelparallel.common.planning.pass_memory import in_flight, most_held
from smdistributed.modelparallel.common.planning.schedule import Action, Kind
from smdistributed.modelparallel.common.search.candidates import Configuration
from smdistributed.modelparallel.common.search.devices import Device
from smdistributed.modelparallel.common.search.profile import ModelProfile
from smdistributed.modelparallel.common.search.stages import Stages

#: Sums of shards are in single precision.
SINGLE_BYTES = 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank, by kind.

    Attributes:
        parameters: whole ones, shards, and what of shards is gathered.
        gradients: those that are summed up, and buckets that go over replicas.
        optimizer: what it keeps, masters included.
        activations: that wait for their backward passes, and what a pass makes on its way.
        transfers: what comes from other ranks of the pipeline and goes to them, and what the step
            is given.
        reserve: driver, collectives, and what the allocator keeps besides.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    transfers: float
    reserve: float = 0.0

    @property
    def total(self) -> float:
        """All kinds together."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.transfers
            + self.reserve
        )


@dataclass(frozen=True)
class Held:
    """What the passes of a rank hold at their fullest.

    Attributes:
        activations: bytes that wait for their backward passes, and what a pass makes on its way.
        in_flight: the most microbatches that are begun and not over.
    """

    activations: float
    in_flight: int

    @classmethod
    def by(cls, actions: Sequence[Action], stages: Stages) -> Held:
        """Returns that of an order.

        Args:
            actions: of the rank.
            stages: of the model.
        """
        most = most_held(actions, lambda action: stages.pieces[action.segment].memory)
        return cls(most, in_flight(actions))

    @classmethod
    def least(cls, rank: int, stages: Stages, waiting: int) -> Held:
        """Returns what no order holds less than.

        Args:
            rank: of the pipeline.
            stages: of the model.
            waiting: how many microbatches wait for their backward passes at least.
        """
        own = [piece.memory for piece in stages.pieces if piece.rank == rank]
        most = max((each.most_in(Kind.FORWARD) for each in own), default=0.0)
        return cls(max(waiting * sum(each.kept for each in own), most), waiting)


def memory_of(
    rank: int,
    stages: Stages,
    held: Held,
    configuration: Configuration,
    profile: ModelProfile,
    device: Device,
) -> RankMemory:
    """Returns what a rank of the pipeline holds.

    Args:
        rank: of the pipeline.
        stages: of the model.
        held: what its passes hold.
        configuration: of the job.
        profile: of the model.
        device: that the rank computes on.
    """
    own, shards = stages.holdings[rank], configuration.shards
    parameters, gradients, optimizer = own.parameter_bytes, own.gradient_bytes, own.optimizer_bytes
    has_buckets = configuration.replicas > 1 and profile.has_buckets
    if has_buckets or (profile.adds_gradients and configuration.microbatches > 1):
        gradients *= 2
    if shards > 1:
        cut = own.share_in_shards
        a_number = own.gradient_bytes / own.trained_elements if own.trained_elements else 0.0
        gathered = min(cut * own.parameter_bytes, profile.most_gathered * a_number)
        parameters = (1 - cut + cut / shards) * own.parameter_bytes + gathered
        gradients *= 1 - cut
        gradients += cut * SINGLE_BYTES * own.trained_elements / shards
        optimizer *= 1 - cut + cut / shards
    elif configuration.shards_optimizer:
        optimizer /= configuration.replicas
    # What was sent is there until it is answered, and the next message is waited for.
    transfers = (held.in_flight + 1) * stages.largest_crossing(rank)
    transfers += profile.given_bytes / configuration.lanes
    # Of activations nothing is left when the update begins.
    activations = max(held.activations, own.update_made_bytes)
    found = RankMemory(parameters, gradients, optimizer, activations, transfers)
    reserve = device.context_bytes + device.slack * found.total
    return dataclasses.replace(found, reserve=reserve)


def fullest(
    stages: Stages,
    held: Sequence[Held],
    configuration: Configuration,
    profile: ModelProfile,
    device: Device,
) -> tuple[RankMemory, ...]:
    """Returns what every rank of the pipeline holds at its fullest.

    Args:
        stages: of the model.
        held: for every rank, what its passes hold.
        configuration: of the job.
        profile: of the model.
        device: that ranks compute on.
    """
    return tuple(
        memory_of(rank, stages, held[rank], configuration, profile, device)
        for rank in range(stages.num_ranks)
    )
