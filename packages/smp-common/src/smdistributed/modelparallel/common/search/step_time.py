"""How long a step takes besides its passes: what ranks exchange, and the optimizer's update.

Someone waits for the end of a step, as a script does that prints a loss: the Python of the next
one, which pipelines run before they compute, is not hidden behind it.
"""

from __future__ import annotations

from smdistributed.modelparallel.common.planning.list_scheduling import CostModel
from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.common.search.candidates import Configuration
from smdistributed.modelparallel.common.search.devices import (
    REACHED_OF_LINKS,
    REACHED_OF_MEMORY,
    Machine,
)
from smdistributed.modelparallel.common.search.hosts import HOSTS
from smdistributed.modelparallel.common.search.pass_time import PassTime
from smdistributed.modelparallel.common.search.profile import ModelProfile
from smdistributed.modelparallel.common.search.rank_memory import SINGLE_BYTES
from smdistributed.modelparallel.common.search.stages import Piece, Stages

#: Of a reduction of gradients, what no backward pass hides: its last bucket.
_BARE = 0.1


class StepTime:
    """The times of one configuration.

    Args:
        stages: of the model.
        configuration: of the job.
        profile: of the model.
        machine: that it runs on.

    Attributes:
        passes: of each piece of the stages, what its passes take, with what they wait for.
        transfers: what the machine adds where a pipeline crosses ranks.
    """

    def __init__(
        self,
        stages: Stages,
        configuration: Configuration,
        profile: ModelProfile,
        machine: Machine,
    ) -> None:
        self._stages = stages
        self._configuration = configuration
        self._profile = profile
        self._machine = machine
        # Slices and pipelines have neighbouring ranks, replicas are a pipeline apart.
        self._apart = self._rate(machine.num_devices)
        self._beside = self._rate(configuration.slices)
        self._pass_time = PassTime(configuration, profile, machine)
        self.passes = [self._passes(piece) for piece in stages.pieces]
        rate = self._rate(configuration.partitions * configuration.slices)
        self.transfers = CostModel(machine.device.latency_seconds, 1 / rate)

    def _rate(self, num_neighbours: int) -> float:
        """Returns the bytes a second between so many ranks that follow each other."""
        rate = self._machine.rate(num_neighbours)
        if self._machine.device.is_gpu:
            return rate
        return min(rate, HOSTS[self._profile.framework].carried_rate)

    def _passes(self, piece: Piece) -> PassCosts:
        costs = self._with_slices(self._pass_time.of(piece.figures), piece)
        shards = self._configuration.shards
        if shards == 1:
            return costs
        cut = piece.figures.share_in_shards
        scattering = self._exchange(SINGLE_BYTES * cut * piece.figures.trained_elements, shards)
        gathering = 0.0 if self._stays_whole(piece.rank) else self._gathering(piece)
        return PassCosts(
            max(costs.forward, gathering),
            max(costs.backward, gathering + scattering),
            costs.weights,
        )

    def _with_slices(self, costs: PassCosts, piece: Piece) -> PassCosts:
        """Returns the costs with what slices gather and sum, which a pass waits for."""
        slices = self._configuration.slices
        if slices == 1 or not piece.figures.exchanged_bytes:
            return costs
        of_all = slices * piece.figures.exchanged_bytes
        exchanging = 2 * self._exchange(of_all, slices, self._beside)
        again = exchanging if piece.figures.recomputed.num_kernels else 0.0
        return costs + PassCosts(exchanging, exchanging + again)

    def _stays_whole(self, rank: int) -> bool:
        """Whether what a rank has gathered need not go before the end of the step."""
        return self._stages.holdings[rank].trained_elements <= self._profile.most_gathered

    def _gathering(self, piece: Piece) -> float:
        cut = piece.figures.share_in_shards
        return self._exchange(cut * piece.figures.parameter_bytes, self._configuration.shards)

    def _exchange(self, num_bytes: float, num_ranks: int, rate: float | None = None) -> float:
        """Returns the seconds of an all-gather or a reduce-scatter, in a ring.

        Args:
            num_bytes: of all ranks.
            num_ranks: that exchange.
            rate: of their links; by default of those between replicas.
        """
        latency = (num_ranks - 1) * self._machine.device.latency_seconds
        reached = REACHED_OF_LINKS * (self._apart if rate is None else rate)
        return latency + num_bytes * (num_ranks - 1) / num_ranks / reached

    def before_passes(self) -> float:
        """Returns the seconds that the Python of all microbatches takes before any is computed."""
        return self._pass_time.before()

    def beside_passes(self) -> float:
        """Returns the seconds of a step in which no pass runs."""
        return self.before_passes() + self.after_passes()

    def after_passes(self) -> float:
        """Returns the seconds that the slowest rank takes when its last pass has ended."""
        return max(self._after_passes(rank) for rank in range(self._stages.num_ranks))

    def _after_passes(self, rank: int) -> float:
        configuration = self._configuration
        pieces = [
            (piece, costs)
            for piece, costs in zip(self._stages.pieces, self.passes, strict=True)
            if piece.rank == rank
        ]
        exposed = 0.0
        if configuration.shards > 1 and self._stays_whole(rank):
            gathering = sum(self._gathering(piece) for piece, _ in pieces)
            exposed += max(0.0, gathering - sum(costs.forward for _, costs in pieces))
        if configuration.replicas > 1:
            reducing = self._reducing(rank)
            hidden = sum(costs.backward for _, costs in pieces)
            exposed += max(_BARE * reducing, reducing - hidden)
        return exposed + self._update(rank)

    def _reducing(self, rank: int) -> float:
        """Returns the seconds in which replicas average what is not summed in shards."""
        configuration, own = self._configuration, self._stages.holdings[rank]
        cut = own.share_in_shards if configuration.shards > 1 else 0.0
        whole = 2 * self._exchange((1 - cut) * own.gradient_bytes, configuration.replicas)
        copies = configuration.replicas // configuration.shards
        if not cut or copies == 1:
            return whole
        a_shard = SINGLE_BYTES * cut * own.trained_elements / configuration.shards
        return whole + 2 * self._exchange(a_shard, copies)

    def _update(self, rank: int) -> float:
        """Returns the seconds of the optimizer: it reads everything and writes most of it."""
        configuration, own = self._configuration, self._stages.holdings[rank]
        owners = configuration.replicas if configuration.shards_optimizer else 1.0
        if configuration.shards > 1:
            cut = own.share_in_shards
            owners = 1 / (1 - cut + cut / configuration.shards)
        touched = 2 * (own.optimizer_bytes + own.gradient_bytes) + own.gradient_bytes
        touched = own.update_bytes or touched
        if self._profile.adds_gradients and configuration.microbatches > 1:
            # Each sum reads two and writes one, and the mean reads one and writes one.
            touched += (3 * configuration.microbatches - 1) * own.gradient_bytes
        update = touched / owners / (REACHED_OF_MEMORY * self._machine.device.memory_rate)
        if configuration.shards_optimizer:  # owners give the others what they have updated
            update += self._exchange(own.gradient_bytes, configuration.replicas)
        return update
