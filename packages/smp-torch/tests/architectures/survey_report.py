"""The survey's outcome as a table and as JSON."""

from __future__ import annotations

import collections
import importlib.metadata
import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import registry
from trial import Trial, Variant
from verdict import Kind, Verdict

#: The worst variant speaks for an architecture.
_ORDER = (Kind.ABSENT, Kind.UNUSABLE, Kind.WRONG, Kind.REFUSED, Kind.EXACT)
_REASON_WIDTH = 110


def as_data(verdicts: Mapping[Trial, Verdict], num_ranks: int) -> dict[str, Any]:
    """Returns the report as plain data: totals, and an entry an architecture."""
    architectures: dict[str, Any] = {}
    verdicts = {
        trial: verdict
        for trial, verdict in verdicts.items()
        if verdict.kind is not Kind.INAPPLICABLE
    }
    for trial, verdict in verdicts.items():
        entry = architectures.setdefault(
            trial.name,
            {"family": registry.ARCHITECTURES[trial.name].family, "verdict": "", "variants": {}},
        )
        entry["variants"][trial.variant.value] = {
            "verdict": verdict.kind.value,
            "reason": verdict.reason,
            "visits": verdict.visits,
            "largest_relative_difference": verdict.difference,
            "details": verdict.details,
        }
    for entry in architectures.values():
        found = {each["verdict"] for each in entry["variants"].values()}
        entry["verdict"] = next(kind.value for kind in _ORDER if kind.value in found)
    return {
        "transformers": importlib.metadata.version("transformers"),
        "torch": importlib.metadata.version("torch"),
        "ranks": num_ranks,
        "totals": _totals(entry["verdict"] for entry in architectures.values()),
        "totals_by_variant": {
            variant.value: _totals(
                verdict.kind.value
                for trial, verdict in verdicts.items()
                if trial.variant is variant
            )
            for variant in Variant
        },
        "causes": _causes(architectures),
        "architectures": architectures,
    }


def _causes(architectures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups what is not exact by its reason, the most frequent first."""
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for name, entry in architectures.items():
        for each in entry["variants"].values():
            if each["reason"]:
                key = (each["verdict"], _without_particulars(each["reason"]))
                groups.setdefault(key, {})[name] = None
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [
        {"verdict": kind, "reason": reason, "architectures": list(names)}
        for (kind, reason), names in ordered
    ]


def _without_particulars(reason: str) -> str:
    """Returns a reason without what differs between architectures: names of modules, numbers."""
    reason = re.sub(r"(of|in) (?!torch|transformers)[a-z_]\w*(\.\w+)+", r"\1 ...", reason)
    reason = re.sub(r"\bin [a-z]\w*(?= (gave|makes|passes))", "in ...", reason)
    reason = re.sub(r"^(\w+Error: )\S+ in \.\.\.", r"\1...", reason)
    return re.sub(r"\d[\d.]*(e[-+]\d+)?", "#", reason)


def _totals(kinds: Any) -> dict[str, int]:
    return dict(collections.Counter(kinds).most_common())


def as_text(data: Mapping[str, Any]) -> str:
    """Returns the report as a table."""
    lines = []
    family = ""
    for name, entry in data["architectures"].items():
        if entry["family"] != family:
            family = entry["family"]
            lines += ["", f"{family}", "-" * len(family)]
        for variant, each in entry["variants"].items():
            shown = name if variant == next(iter(entry["variants"])) else ""
            visits = len(each["visits"]) or ""
            reason = each["reason"][:_REASON_WIDTH]
            lines.append(f"{shown:26} {variant:15} {each['verdict']:9} {visits!s:>3}  {reason}")
    head = f"transformers {data['transformers']}, torch {data['torch']}, {data['ranks']} ranks"
    totals = [f"architectures: {_sum(data['totals'])}"]
    totals += [f"  {name}: {_sum(found)}" for name, found in data["totals_by_variant"].items()]
    causes = ["", "causes", "------"]
    for cause in data["causes"]:
        causes.append(f"{len(cause['architectures'])} {cause['verdict']}: {cause['reason']}")
        causes += textwrap.wrap(
            " ".join(cause["architectures"]),
            100,
            initial_indent="    ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
    return "\n".join([head, *totals, *lines, *causes, ""])


def _sum(totals: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in totals.items())


def write(directory: Path, verdicts: Mapping[Trial, Verdict], num_ranks: int) -> str:
    """Writes report.json and report.txt, and returns the text."""
    data = as_data(verdicts, num_ranks)
    text = as_text(data)
    (directory / "report.json").write_text(json.dumps(data, indent=1))
    (directory / "report.txt").write_text(text)
    return text
