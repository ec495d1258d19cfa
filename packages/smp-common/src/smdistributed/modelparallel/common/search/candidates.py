"""The configurations that a job could have: all that the library can be told to do."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from smdistributed.modelparallel.common.config.loading import takes
from smdistributed.modelparallel.common.search.devices import Machine
from smdistributed.modelparallel.common.search.profile import ModelProfile

Pipelines = Literal["interleaved", "simple", "zero_bubble", "zero_bubble_v"]

#: The first of them is the default.
PIPELINES: tuple[Pipelines, ...] = ("interleaved", "simple", "zero_bubble", "zero_bubble_v")


@dataclass(frozen=True, order=True)
class Configuration:
    """What decides how a job uses its devices.

    Attributes:
        partitions: of the model.
        slices: of each partition, on the ranks of a tensor-parallel group.
        replicas: of each slice, in shards or not.
        shards: over how many of these ranks parameters lie.
        shards_optimizer: whether replicas share the optimizer's state alone.
        microbatches: that a replica's batch is cut into.
        pipeline: the kind of schedule.
        checkpointed_blocks: every so manieth block is computed again; 0 for none.
        optimize: what partitions balance; None where the framework has one way.
    """

    partitions: int
    slices: int
    replicas: int
    shards: int
    shards_optimizer: bool
    microbatches: int
    pipeline: Pipelines
    checkpointed_blocks: int = 0
    optimize: str | None = None

    @property
    def lanes(self) -> int:
        """How many ranks that compute the same partition bring examples of their own."""
        return self.slices * self.replicas

    @property
    def num_mechanisms(self) -> int:
        """How many kinds of parallelism it has."""
        return (
            (self.partitions > 1)
            + (self.slices > 1)
            + (self.replicas > self.shards)
            + (self.shards > 1)
            + self.shards_optimizer
        )

    def settings(self, profile: ModelProfile) -> dict[str, Any]:
        """Returns the parameters that ask for it, whatever the script says.

        Args:
            profile: knows what the script says.
        """
        wanted: dict[str, Any] = {
            "pipeline_parallel_degree": self.partitions,
            "microbatches": self.microbatches,
        }
        said = profile.settings.get("pipeline")
        if self.partitions > 1 and self.microbatches > 1 and said != self.pipeline:
            wanted["pipeline"] = self.pipeline  # what a job chooses itself differs
        defaults: dict[str, Any] = {
            "sharded_data_parallel_degree": self.shards,
            "shard_optimizer_state": self.shards_optimizer,
            "tensor_parallel_degree": self.slices,
            "checkpointed_blocks": self.checkpointed_blocks,
        }
        usual = (1, False, 1, 0)
        for (name, value), default in zip(defaults.items(), usual, strict=True):
            if profile.settings.get(name, default) != value:
                wanted[name] = value
        balanced = profile.settings.get("optimize", "memory")
        if self.partitions > 1 and self.optimize not in (None, balanced):
            wanted["optimize"] = self.optimize
        if profile.settings.get("auto_partition") is False:
            wanted["auto_partition"] = True  # the plan's partitions are not those cut by hand
        has_ddp = takes(profile.framework, "ddp")
        if has_ddp and self.lanes > 1 and not profile.settings.get("ddp"):
            wanted["ddp"] = True
        return wanted


def with_more_checkpoints(
    configuration: Configuration, profile: ModelProfile
) -> Configuration | None:
    """Returns what needs less memory, and more time, and is the same otherwise; None for nothing.

    So checkpointing is a choice only of what does not fit without.
    """
    if not profile.stacks or profile.recomputes or configuration.checkpointed_blocks == 1:
        return None
    every = 1 if configuration.checkpointed_blocks else 2
    return dataclasses.replace(configuration, checkpointed_blocks=every)


def divisors(number: int) -> list[int]:
    """Returns what divides a number, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def configurations(profile: ModelProfile, machine: Machine) -> Iterator[Configuration]:
    """Yields the configurations of a job on all devices of a machine, at the batch of the script.

    Microbatches are equal, so their number divides the batch of a replica. What the framework does
    not have is left out.
    """
    has = functools.partial(takes, profile.framework)
    pipelines = [each for each in PIPELINES if has("pipeline", each)]
    has_shards, shares_state = has("sharded_data_parallel_degree"), has("shard_optimizer_state")
    most = sum(1 for unit in profile.root.walk() if not unit.children)
    shared = _powers_of_two(machine.devices_per_host) if profile.is_sliced else [1]
    for partitions, slices in itertools.product(divisors(machine.num_devices), shared):
        replicas, left = divmod(machine.num_devices, partitions * slices)
        lanes = slices * replicas
        if left or partitions > most or profile.batch % lanes:
            continue
        places = partitions, slices, replicas
        words: list[str | None] = [*profile.memory_weights] or [None]
        if profile.memory_weights and "optimize" in profile.settings:  # the script says it
            words = [profile.settings["optimize"]]
        for microbatches in divisors(profile.batch // lanes):
            for pipeline in pipelines if partitions > 1 and microbatches > 1 else pipelines[:1]:
                used = microbatches, pipeline
                for shards in divisors(replicas) if has_shards else (1,):
                    for word in words if partitions > 1 else words[:1]:
                        yield Configuration(*places, shards, False, *used, optimize=word)
                if replicas > 1 and shares_state:
                    yield Configuration(*places, 1, True, *used)


def _powers_of_two(most: int) -> list[int]:
    """Returns those that divide the devices of a host: slices exchange too much for a network."""
    return [each for each in divisors(most) if not each & (each - 1)]
