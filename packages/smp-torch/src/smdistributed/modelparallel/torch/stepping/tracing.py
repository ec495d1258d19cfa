"""What is measured while a step is recorded, and how all ranks come to the same figures."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.model.distributed import DistributedModel
from smdistributed.modelparallel.torch.planning.compute_costs import ComputeCosts
from smdistributed.modelparallel.torch.planning.timing import measure
from smdistributed.modelparallel.torch.record.costs.meter import Meter
from smdistributed.modelparallel.torch.record.costs.work import Operations
from smdistributed.modelparallel.torch.record.scene import Scene
from smdistributed.modelparallel.torch.runtime.capacity import available_on
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime

logger = logging.getLogger(__name__)

#: Of a device. Where parameters and what belongs to them take more, activations may not fit.
_MUCH_OF_MEMORY = 0.25


class Tracing:
    """The meters of a step function's runs on fakes, and what its work costs.

    Args:
        runtime: the state of the library in this process.
        function: the step function's.
        compiles_runs: what lies between modules is compiled.

    Attributes:
        costs: what work costs.
    """

    def __init__(
        self, runtime: TorchRuntime, function: Callable[..., Any], *, compiles_runs: bool
    ) -> None:
        self._runtime = runtime
        self._function = function
        self._operations = Operations()
        self.costs = ComputeCosts(compiles_runs=compiles_runs)

    @contextlib.contextmanager
    def metered(self, models: Sequence[DistributedModel], scene: Scene) -> Iterator[Meter]:
        """Gives a meter for a run on fakes that calls models.

        Args:
            models: all that there are; what one of them asks for is measured of all.
            scene: what the run can meet.
        """
        self.costs.measures |= any(each.tracing.trace_execution_times for each in models)
        operations = self._operations if self.costs.measures else None
        counts_kept = bool(scene.open) and any(each.tracing.trace_memory_usage for each in models)
        if not (counts_kept or self._notes_passes(models)):
            yield Meter(self._runtime.fake_mode, operations)
            return
        meter = Meter(
            self._runtime.fake_mode,
            operations,
            not_kept=scene.storages,
            counts_kept=counts_kept,
        )
        with torch.autograd.graph.saved_tensors_hooks(meter.keep, meter.give):
            yield meter

    def _notes_passes(self, models: Sequence[DistributedModel]) -> bool:
        """Whether it is noted what passes hold, which takes half as long again on fakes.

        It makes no difference but for the log, which tells it, or warns where it does not fit. Each
        rank may do as it likes.
        """
        if self._runtime.passes.knows(self._function):
            return False
        return logger.isEnabledFor(logging.INFO) or self._is_memory_short(models)

    def _is_memory_short(self, models: Sequence[DistributedModel]) -> bool:
        """Whether parameters, their gradients and two moments may leave little to activations."""
        runtime = self._runtime
        parameters = (each for model in models for each in model.get_module().parameters())
        needed = 4 * sum(each.numel() * each.element_size() for each in parameters)
        sharing = runtime.transport.local_size if runtime.device.type == "cpu" else 1
        own = needed * sharing / runtime.topology.pp_size
        return own > _MUCH_OF_MEMORY * available_on(runtime.device)

    def measure(self, group: CommGroup) -> None:
        """Times what is new, on the first rank of a group. Collective: that group."""
        if not self.costs.measures:
            return
        first = self._runtime.topology.members(group, self._runtime.rank)[0]
        measured = None
        if self._runtime.rank == first:
            known = self.costs.measured
            new = {
                name: operation
                for name, operation in self._operations.known.items()
                if name not in known
            }
            measured = {**known, **measure(new, self._runtime.device)}
        self.costs.take(self._runtime.communicator.from_first(measured, group) or {})
