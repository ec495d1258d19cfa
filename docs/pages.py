"""What conf.py writes into ``_generated`` at each build: tables and pictures of the code itself."""

from __future__ import annotations

import enum
import inspect
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common import config
from smdistributed.modelparallel.common.config import docs as config_docs
from smdistributed.modelparallel.common.config.parameters import Parameters
from smdistributed.modelparallel.common.config.schema import (
    TENSORFLOW,
    parameter,
)
from smdistributed.modelparallel.common.planning import report
from smdistributed.modelparallel.common.planning.choosing import (
    fastest,
    kinds_of,
)
from smdistributed.modelparallel.common.planning.schedule import (
    Edge,
    Segment,
    SegmentGraph,
)
from smdistributed.modelparallel.common.planning.simulator import build_schedule
from smdistributed.modelparallel.launch.request import (
    arguments as launch_arguments,
)
from smdistributed.modelparallel.torch import nn, optimizers
from smdistributed.modelparallel.torch.compat import later
from smdistributed.modelparallel.torch.patches import checkpoint

SOURCES = {
    "torch": Path(str(smp.__file__)).parent,
    "config": Path(str(config.__file__)).parent,
}
_REPORTS = (Path(__file__).parents[1] / "conformance" / "reports").glob(
    "*.json"
)
#: What a docstring says of a name that stands for something else.
_COMPATIBILITY = "Compatibility: "
#: Public in Python, for other files of the library; no script needs them.
_INTERNAL = {
    "DistributedModel": (
        *("refresh", "place", "run_post_step_hooks"),
        *("check_options", "is_made_of", "stand_for"),
    ),
    "DistributedOptimizer": ("serves", "step_was_skipped"),
    "StepOutput": (),
}


def write(folder: Path) -> None:
    """Writes all generated files."""
    folder.mkdir(exist_ok=True)
    files = {
        "configuration.md": config_docs.page(),
        "compatibility.md": compatibility(),
        "conformance.md": conformance(),
        "classes.md": classes(),
        "estimator_arguments.md": launch_arguments.page(),
        "schedule_simple.svg": schedule_picture("simple", visits=1),
        "schedule_interleaved.svg": schedule_picture("interleaved", visits=1),
        "schedule_zero_bubble.svg": schedule_picture("zero_bubble", visits=1),
        "schedule_zero_bubble_v.svg": schedule_picture(
            "zero_bubble_v", visits=1
        ),
        "schedule_tied.svg": schedule_picture("interleaved", visits=2),
        "schedule_times.md": schedule_times(),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def schedule_picture(pipeline: Any, visits: int) -> str:
    """Draws a schedule of four ranks in a chain or a V, or of two where microbatches come back."""
    graph = pipeline_of(4, pipeline)
    if visits == 2:
        costs = (1.0, 1.5, 0.5)
        segments = (
            Segment(i, i % 2, costs[i], 2 * costs[i], has_backward=True)
            for i in range(3)
        )
        graph = SegmentGraph(tuple(segments), graph.edges[:2], num_ranks=2)
    (searched,) = kinds_of(pipeline)
    timeline = build_schedule(graph, 6, searched, active_microbatches=6)
    title = pipeline if visits == 1 else f"{pipeline}, with tied weights"
    return report.timeline_svg(timeline, title, in_seconds=False)


def schedule_times() -> str:
    """Compares the times of schedules, with two numbers of active microbatches."""
    kinds: tuple[Any, ...] = ("interleaved", "zero_bubble", "zero_bubble_v")
    ends = "", ", P active"
    header = [
        "P",
        "M",
        "no rank idle",
        *(f"`{kind}`{end}" for end in ends for kind in kinds),
    ]
    lines = [header, ["---"] * len(header)]
    for ranks, microbatches in itertools.product((2, 4, 8), (8, 16)):
        lines.append([str(ranks), str(microbatches), str(3 * microbatches)])
        for active, kind in itertools.product((ranks + 2, ranks), kinds):
            (searched,) = kinds_of(kind)
            timeline = fastest(
                pipeline_of(ranks, kind), microbatches, searched, active
            )
            lines[-1].append(f"{timeline.makespan:.1f}")
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def pipeline_of(num_ranks: int, kind: str) -> SegmentGraph:
    """Returns a chain or a V of ranks whose F, I and W take 1."""
    ranks = list(range(num_ranks))
    costs = [1.0] * num_ranks
    if kind == "zero_bubble_v":
        ranks += ranks[-2::-1]
        costs = [1.0 if rank == num_ranks - 1 else 0.5 for rank in ranks]
    halves = kind.startswith("zero_bubble")
    return SegmentGraph(
        segments=tuple(
            Segment(
                index, rank, cost, cost, has_backward=True, weight_cost=cost
            )
            if halves
            else Segment(index, rank, cost, 2 * cost, has_backward=True)
            for index, (rank, cost) in enumerate(zip(ranks, costs, strict=True))
        ),
        edges=tuple(
            Edge(i, i + 1, num_bytes=0, has_grad=True)
            for i in range(len(ranks) - 1)
        ),
        num_ranks=num_ranks,
    )


def compatibility() -> str:
    """Lists the names of the PyTorch package and the parameters, and what became of each."""
    sections = [
        ("Names of `smp`", table(names_of(smp, smp.__all__, "smp"))),
        *(
            (f"Methods of `{name}`", table(methods_of(name)))
            for name in _INTERNAL
        ),
        (
            "Activation checkpointing in `smp.patches.checkpoint`",
            table(
                names_of(
                    checkpoint, ("checkpoint", "checkpoint_sequential"), ""
                )
            ),
        ),
        (
            "Loss scaling in `smp.amp`",
            table(names_of(smp.amp, smp.amp.__all__, "smp.amp")),
        ),
        ("Modules in `smp.nn`", table(names_of(nn, nn.__all__, "smp.nn"))),
        (
            "Optimizers in `smp.optimizers`",
            table(names_of(optimizers, optimizers.__all__, "smp.optimizers")),
        ),
        ("Parameters", table(parameters())),
    ]
    return "\n".join(f"## {title}\n\n{text}" for title, text in sections)


def conformance() -> str:
    """Shows the last report on each framework that was put beside the suite."""
    return "\n".join(
        _conformance(json.loads(path.read_text())) for path in sorted(_REPORTS)
    )


def _conformance(report: dict[str, Any]) -> str:
    count = len(report["rows"])
    totals = ", ".join(
        f"{number} {status}" for status, number in report["totals"].items()
    )
    rows = (
        (
            f"`{row['id']}`",
            row["status"]
            + (f": {row['without_effect']}" if row["without_effect"] else ""),
            "; ".join(
                case["title"].rstrip(".") for case in row["cases"].values()
            ),
            row["source"],
        )
        for row in report["rows"]
    )
    header = "| row | status | cases | source |\n| --- | --- | --- | --- |"
    body = "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)
    return f"## {report['framework']}\n\n{count} rows: {totals}.\n\n{header}\n{body}\n"


def names_of(
    module: Any, names: Sequence[str], prefix: str
) -> Iterator[tuple[str, str, str]]:
    """Yields name, state and meaning of names of a module."""
    for name in names:
        thing = getattr(module, name)
        if not inspect.ismodule(thing):
            yield (
                f"{prefix}.{name}".lstrip("."),
                state_of(name, thing),
                summary(thing),
            )


def methods_of(name: str) -> Iterator[tuple[str, str, str]]:
    """Yields name, state and meaning of the methods that a script calls of a class of ours."""
    places = [
        each
        for each in getattr(smp, name).__mro__
        if each.__module__.startswith("smdistributed")
    ]
    found = {
        name: thing
        for each in reversed(places)
        for name, thing in vars(each).items()
    }
    unknown = set(_INTERNAL[name]) - set(found)
    assert not unknown, unknown
    for method, thing in found.items():
        if (
            not method.startswith("_")
            and method not in _INTERNAL[name]
            and inspect.getdoc(thing)
        ):
            yield method, state_of(method, thing), summary(thing)


def classes() -> str:
    """Writes the reference of the classes with all their methods, of their bases too."""
    texts = []
    for name in _INTERNAL:
        lines = [
            f".. autoclass:: smdistributed.modelparallel.torch.{name}",
            "   :no-members:",
        ]
        for method, _, _ in methods_of(name):
            thing = inspect.getattr_static(getattr(smp, name), method)
            kind = (
                "autoproperty" if isinstance(thing, property) else "automethod"
            )
            lines += [
                "",
                f"   .. {kind}:: smdistributed.modelparallel.torch.{name}.{method}",
            ]
        texts.append(
            f"### {name}\n\n```{{eval-rst}}\n{chr(10).join(lines)}\n```\n"
        )
    return "\n".join(texts)


def state_of(name: str, thing: Any) -> str:
    """Tells what became of a name."""
    if getattr(thing, "__module__", "") == later.__name__:
        return "later"
    return (
        "name only"
        if (inspect.getdoc(thing) or "").startswith(_COMPATIBILITY)
        else "there"
    )


def summary(thing: Any) -> str:
    """Returns the first sentence about a thing."""
    if isinstance(thing, enum.Enum):
        return f"An argument of functions that communicate: `smp.barrier(smp.{thing.name})`."
    if not (
        inspect.isroutine(thing)
        or inspect.isclass(thing)
        or isinstance(thing, property)
    ):
        return ""
    text = (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")
    return text.removeprefix(_COMPATIBILITY).replace("``", "`")


def parameters() -> Iterator[tuple[str, str, str]]:
    """Yields name, state and meaning of the parameters of the PyTorch package.

    One that no line of the library reads has no effect.
    """
    files = [
        *SOURCES["torch"].rglob("*.py"),
        *SOURCES["config"].glob("[lp]*.py"),
    ]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    for name, field in Parameters.model_fields.items():
        if parameter(field).frameworks == TENSORFLOW:
            yield name, "not applicable", "of TensorFlow only"
        elif re.search(
            rf'\b(config|settings|self)\.{name}\b|given\.get\("{name}"', code
        ):
            yield name, "there", parameter(field).meaning
        else:
            yield name, "no effect", "checked and accepted"


def table(rows: Iterator[tuple[str, str, str]]) -> str:
    """Returns a Markdown table; names in code."""
    lines = ["| name | state | meaning |", "| --- | --- | --- |"]
    lines += [
        f"| `{name}` | {state} | {meaning.replace('|', chr(92) + '|')} |"
        for name, state, meaning in rows
    ]
    return "\n".join(lines) + "\n"
