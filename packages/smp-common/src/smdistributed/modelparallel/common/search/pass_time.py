"""How long passes take: what the device needs for them, or what the host needs to start them.

A pass that Python launches takes the host a time for each kernel, and for each call of a module. Of
one that is captured as a CUDA graph the host only compares the calls of its forward pass with those
that were captured, and launches all kernels at once.
"""

from __future__ import annotations

from smdistributed.modelparallel.common.planning.pass_costs import PassCosts
from smdistributed.modelparallel.common.search.candidates import Configuration
from smdistributed.modelparallel.common.search.devices import (
    REACHED,
    REACHED_OF_MEMORY,
    Device,
    Machine,
)
from smdistributed.modelparallel.common.search.hosts import HOSTS
from smdistributed.modelparallel.common.search.profile import Computation, Figures, ModelProfile


class PassTime:
    """The times of passes in one configuration.

    Args:
        configuration: of the job.
        profile: of the model.
        machine: that it runs on.
    """

    def __init__(
        self, configuration: Configuration, profile: ModelProfile, machine: Machine
    ) -> None:
        self._configuration = configuration
        self._profile = profile
        self._device = machine.device
        self._host = HOSTS[profile.framework]
        self._is_captured = _is_captured(configuration, profile, machine)

    def of(self, figures: Figures) -> PassCosts:
        """Returns the seconds of the passes of a part of the model."""
        passes = self._on_device(figures)
        forward, backward = self._on_host(figures.computation, figures.recomputed)
        if not self._device.is_gpu:  # the host is what computes
            return PassCosts(passes.forward + forward, passes.backward + backward, passes.weights)
        backward = max(passes.backward, backward)
        share = passes.weights / passes.backward if passes.backward else 0.0
        return PassCosts(max(passes.forward, forward), backward, share * backward)

    def before(self) -> float:
        """Returns the seconds in which Python runs before anything is computed.

        In a pipeline each rank runs that of the whole model for all microbatches, on tensors
        without data. One that launches captured passes confirms the first one before.
        """
        whole = sum((unit.own.computation for unit in self._profile.root.walk()), Computation())
        if self._configuration.partitions == 1:
            return self._confirming(whole) if self._is_captured else 0.0
        modules = self._configuration.microbatches * whole.num_modules
        return modules * self._host.module_seconds

    def _confirming(self, work: Computation) -> float:
        """Returns what the host takes to compare calls with those that were captured."""
        host = self._host
        return host.comparing_seconds * work.num_kernels + host.module_seconds * work.num_modules

    def _on_device(self, figures: Figures) -> PassCosts:
        """Returns what passes take if nobody waits for the host, timed where that was done."""
        estimated = on_device(figures, self._device, self._profile.precision)
        seconds = figures.seconds
        if seconds is None or self._profile.timed_on != self._device.name:
            return estimated
        work, again = (
            _roofline(each, self._device, self._profile.precision).forward
            for each in (figures.computation, figures.recomputed)
        )
        repeated = seconds.forward * again / work if work else 0.0
        return seconds + PassCosts(0.0, repeated)

    def _on_host(self, work: Computation, again: Computation) -> tuple[float, float]:
        """Returns what the host takes for a forward and for a backward pass."""
        host = self._host
        action = host.action_seconds if self._configuration.partitions > 1 else 0.0
        if self._is_captured:
            return action + self._confirming(work), action
        call = self._device.call_seconds if host.call_seconds is None else host.call_seconds
        forward, repeated = (call * (each.num_kernels + each.num_modules) for each in (work, again))
        return action + forward, action + 2 * forward + repeated


def on_device(figures: Figures, device: Device, precision: str) -> PassCosts:
    """Returns what passes take if nobody waits for the host: a roofline for each kernel."""
    passes = _roofline(figures.computation, device, precision)
    again = _roofline(figures.recomputed, device, precision).forward
    return PassCosts(passes.forward, passes.backward + again, passes.weights)


def _roofline(work: Computation, device: Device, precision: str) -> PassCosts:
    operations = REACHED * device.operations[precision]  # type: ignore[index]
    moved = work.moved_bytes / (REACHED_OF_MEMORY * device.memory_rate)
    others = work.of_others / operations + moved + device.kernel_seconds * work.num_kernels
    return PassCosts.counted(work.of_weights / operations, others)


def _is_captured(configuration: Configuration, profile: ModelProfile, machine: Machine) -> bool:
    """Whether passes are CUDA graphs, by what the step function asks for."""
    if not machine.device.is_gpu or profile.graphs is False:
        return False
    if configuration.shards > 1 and configuration.partitions * configuration.slices > 1:
        return False
    if profile.graphs is True or configuration.shards == 1:
        return True
    return configuration.shards == configuration.replicas <= machine.devices_per_host
