"""A plan as people and programs read it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Sequence

from rich.table import Table

from smdistributed.modelparallel.common.search.candidates import Configuration
from smdistributed.modelparallel.common.search.devices import Machine
from smdistributed.modelparallel.common.search.profile import Figures, ModelProfile
from smdistributed.modelparallel.common.search.rank_memory import RankMemory
from smdistributed.modelparallel.common.search.ranking import Estimate, Plan

_GIB = 1 << 30

#: Gives the words of the command that starts a job with a configuration.
CommandOf = Callable[[Configuration], Sequence[str]]


def summary(profile: ModelProfile, machine: Machine, plan: Plan) -> list[str]:
    """Returns lines that say what was planned for, and by which figures."""
    whole = sum((unit.own for unit in profile.root.walk()), Figures())
    hosts = f" on {machine.num_hosts} hosts" if machine.num_hosts > 1 else ""
    lines = [
        f"{profile.step}: {_count(whole.trained_elements)} parameters that train, "
        f"{profile.optimizer or 'no optimizer'}, {profile.batch} examples a step, products in "
        f"{profile.precision} precision",
        f"{machine.num_devices} x {machine.device.name}{hosts}, {gib(machine.memory_bytes)} GiB "
        "each; times are estimated from data sheets",
        f"{plan.num_configurations} configurations, of which {plan.num_fitting} may fit",
    ]
    return [*lines, *(f"note: {note}" for note in profile.notes)]


def _count(number: float) -> str:
    """Returns a number with three digits: 1.21 B, 304 K."""
    for letter, unit in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return f"{number:.0f}"


def ranking(plan: Plan) -> Table:
    """Returns the best configurations."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "partitions", "replicas", "shards", "microbatches", "schedule"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for name in ("step ms", "examples/s", "peak GiB", "idle"):
        table.add_column(name, justify="right")
    for place, each in enumerate(plan.best, 1):
        table.add_row(str(place), *_cells(each))
    return table


def refusals(plan: Plan) -> list[str]:
    """Returns a line for each configuration that is told of and does not fit."""
    return [f"does not fit: {_described(each)}: {why(each.peak)}" for each in plan.refused]


def _cells(estimate: Estimate) -> list[str]:
    own = estimate.configuration
    shards = "state" if own.shards_optimizer else str(own.shards) if own.shards > 1 else "-"
    return [
        str(own.partitions),
        str(own.replicas),
        shards,
        str(own.microbatches),
        own.pipeline if own.partitions > 1 else "-",
        f"{1e3 * estimate.seconds:.1f}"
        if estimate.seconds < 10
        else f"{1e3 * estimate.seconds:.0f}",
        f"{estimate.rate:.0f}" if estimate.rate >= 100 else f"{estimate.rate:.3g}",
        gib(estimate.peak.total),
        f"{estimate.idle:.0%}",
    ]


def _described(estimate: Estimate) -> str:
    own = estimate.configuration
    words = f"{own.partitions} partitions, {own.replicas} replicas"
    if own.shards > 1:
        words += f" in {own.shards} shards"
    if own.shards_optimizer:
        words += " that share the optimizer's state"
    return f"{words}, {own.microbatches} microbatches, {own.pipeline}"


def why(memory: RankMemory) -> str:
    """Returns what a rank needs, in bytes by kind, the largest first."""
    kinds = dataclasses.asdict(memory)
    parts = sorted(((size, kind) for kind, size in kinds.items() if size), reverse=True)
    listed = " + ".join(f"{gib(size)} {kind}" for size, kind in parts)
    return f"{gib(memory.total)} GiB = {listed}"


def gib(num_bytes: float) -> str:
    """Returns a number of GiB with three digits that say something."""
    return f"{num_bytes / _GIB:.3g}"


def as_json(plan: Plan, profile: ModelProfile, machine: Machine, command_of: CommandOf) -> str:
    """Returns a plan for programs."""

    def line(estimate: Estimate) -> dict[str, object]:
        return {
            "command": shlex.join(command_of(estimate.configuration)),
            "parameters": estimate.configuration.settings(profile),
            "step_seconds": estimate.seconds,
            "examples_per_second": estimate.rate,
            "idle": estimate.idle,
            "memory_bytes": [dataclasses.asdict(rank) for rank in estimate.memory],
        }

    document = {
        "step": profile.step,
        "batch": profile.batch,
        "device": machine.device.name,
        "devices": machine.num_devices,
        "hosts": machine.num_hosts,
        "device_memory_bytes": machine.memory_bytes,
        "estimated": True,
        "best": [line(each) for each in plan.best],
        "does_not_fit": [line(each) for each in plan.refused],
    }
    return json.dumps(document, indent=2) + "\n"
