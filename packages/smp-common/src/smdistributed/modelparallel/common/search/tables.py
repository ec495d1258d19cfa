"""A plan as people and programs read it."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console
from rich.table import Table

from smdistributed.modelparallel.common.search.devices import Machine
from smdistributed.modelparallel.common.search.profile import Figures, ModelProfile
from smdistributed.modelparallel.common.search.rank_memory import RankMemory
from smdistributed.modelparallel.common.search.ranking import Estimate, Ranking

_GIB = 1 << 30

#: By every how manieth block is computed again.
_CHECKPOINTS = {0: "-", 1: "all", 2: "half"}
#: Of a table, in characters, where nobody says how many there are.
WIDTH = 120


def summary(
    profile: ModelProfile, machine: Machine, ranking: Ranking, factor: float | None
) -> list[str]:
    """Returns lines that say what was planned for, and by which figures."""
    learned = "" if factor is None else f", times {factor:.3g} as steps of this model were measured"
    whole = sum((unit.own for unit in profile.root.walk()), Figures())
    hosts = f" on {machine.num_hosts} hosts" if machine.num_hosts > 1 else ""
    lines = [
        f"{profile.step}: {_count(whole.trained_elements)} parameters that train, "
        f"{profile.optimizer or 'no optimizer'}, {profile.batch} examples a step, products in "
        f"{profile.precision} precision",
        f"{machine.num_devices} x {machine.device.name}{hosts}, {gib(machine.memory_bytes)} GiB "
        f"each; {_source(profile, machine)}{learned}",
        f"{ranking.num_configurations} configurations, of which {ranking.num_fitting} may fit",
    ]
    return [*lines, *(f"note: {note}" for note in profile.notes)]


def _source(profile: ModelProfile, machine: Machine) -> str:
    """Returns where times come from."""
    if profile.timed_on == machine.device.name:
        return "operations were timed on one, the rest is estimated from data sheets"
    return "times are estimated from data sheets"


def _count(number: float) -> str:
    """Returns a number with three digits: 1.21 B, 304 K."""
    for letter, unit in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return f"{number:.0f}"


def best_of(ranking: Ranking, width: int = WIDTH) -> str:
    """Returns a table of the best configurations."""
    left = ("schedule", "balanced", "checkpoints")
    degrees = ("partitions", "slices", "replicas", "shards", "microbatches")
    names = ("", *degrees, *left, "step ms", "examples/s", "peak GiB", "idle")
    rows = [(str(place), *_cells(each)) for place, each in enumerate(ranking.best, 1)]
    # What no line has is no column.
    shown = [at for at in range(len(names)) if any(row[at] != "-" for row in rows)]
    table = Table(box=None, pad_edge=False)
    for at in shown:
        table.add_column(names[at], justify="left" if names[at] in left else "right")
    for row in rows:
        table.add_row(*(row[at] for at in shown))
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(table, highlight=False)
    return captured.get().rstrip("\n")


def refusals(ranking: Ranking) -> list[str]:
    """Returns a line for each configuration that is told of and does not fit."""
    return [f"does not fit: {_described(each)}: {why(each.peak)}" for each in ranking.refused]


def _cells(estimate: Estimate) -> list[str]:
    own = estimate.configuration
    shards = "state" if own.shards_optimizer else str(own.shards) if own.shards > 1 else "-"
    return [
        str(own.partitions),
        str(own.slices) if own.slices > 1 else "-",
        str(own.replicas),
        shards,
        str(own.microbatches),
        own.pipeline if own.partitions > 1 else "-",
        own.optimize or "-" if own.partitions > 1 else "-",
        _CHECKPOINTS[own.checkpointed_blocks],
        f"{1e3 * estimate.seconds:.1f}"
        if estimate.seconds < 10
        else f"{1e3 * estimate.seconds:.0f}",
        f"{estimate.rate:.0f}" if estimate.rate >= 100 else f"{estimate.rate:.3g}",
        gib(estimate.peak.total),
        f"{estimate.idle:.0%}",
    ]


def _described(estimate: Estimate) -> str:
    own = estimate.configuration
    words = f"{own.partitions} partitions"
    words += f", {own.slices} slices" if own.slices > 1 else ""
    words += f", {own.replicas} replicas"
    if own.shards > 1:
        words += f" in {own.shards} shards"
    if own.shards_optimizer:
        words += " that share the optimizer's state"
    words += f", {own.microbatches} microbatches, {own.pipeline}"
    words += f", balanced for {own.optimize}" if own.optimize and own.partitions > 1 else ""
    every = own.checkpointed_blocks
    return f"{words}, checkpoints of {_CHECKPOINTS[every]} blocks" if every else words


def why(memory: RankMemory) -> str:
    """Returns what a rank needs, in bytes by kind, the largest first."""
    kinds = dataclasses.asdict(memory)
    parts = sorted(((size, kind) for kind, size in kinds.items() if size), reverse=True)
    listed = " + ".join(f"{gib(size)} {kind}" for size, kind in parts)
    return f"{gib(memory.total)} GiB = {listed}"


def gib(num_bytes: float) -> str:
    """Returns a number of GiB with three digits that say something."""
    return f"{num_bytes / _GIB:.3g}"
