"""Surveys architectures: ``python packages/smp-torch/tests/architectures gpt2 --verbose``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import registry
import survey_report
from survey import survey
from trial import Trial, Variant
from verdict import Kind, Verdict


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Trains reduced Transformers architectures on several processes and holds "
        "losses and gradients against one process."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="architectures or families; all if none is given"
    )
    parser.add_argument("--ranks", type=int, default=2, help="partitions (2)")
    parser.add_argument(
        "--variant", action="append", choices=[each.name.lower() for each in Variant], help="all"
    )
    parser.add_argument("--seconds", type=float, default=100, help="time limit of a trial (100)")
    parser.add_argument("--directory", type=Path, help="keep records and report.{txt,json} here")
    parser.add_argument(
        "--tensor-parallel",
        action="store_true",
        help="split modules over the ranks by auto=True, not the model",
    )
    parser.add_argument("--verbose", action="store_true", help="show stacks and all differences")
    parser.add_argument("--list", action="store_true", help="show the names")
    options = parser.parse_args()
    names = _selected(parser, options.names)
    if options.list:
        print("\n".join(f"{registry.ARCHITECTURES[name].family:16} {name}" for name in names))
        return 0
    variants = [
        each for each in Variant if each.name.lower() in (options.variant or [each.name.lower()])
    ]
    with tempfile.TemporaryDirectory(prefix="architectures-") as temporary:
        directory = options.directory or Path(temporary)
        trials = [Trial(name, variant) for variant in variants for name in names]
        return _run(trials, directory, options)


def _selected(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    known = {*registry.ARCHITECTURES, *registry.FAMILIES, "representative"}
    if unknown := [word for word in words if word not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; --list shows the names.")
    few = registry.REPRESENTATIVE if "representative" in words else ()
    return [
        name
        for name, each in registry.ARCHITECTURES.items()
        if not words or name in words or each.family in words or name in few
    ]


def _run(trials: list[Trial], directory: Path, options: argparse.Namespace) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    found: dict[Trial, Verdict] = {}

    def note(trial: Trial, verdict: Verdict) -> None:
        found[trial] = verdict
        progress = f"{len(found)}/{len(trials)}"
        print(f"{progress:8} {trial.stem:40} {verdict.kind.value:9} {verdict.reason}", flush=True)
        if options.verbose and verdict.details:
            print(verdict.details, flush=True)
        survey_report.write(directory, found, options.ranks)

    verdicts = survey(
        trials,
        options.ranks,
        directory,
        seconds=options.seconds,
        on_verdict=note,
        tensor_parallel=options.tensor_parallel,
    )
    print(survey_report.write(directory, verdicts, options.ranks))
    print(f"{time.monotonic() - started:.0f} s")
    return int(any(each.kind in (Kind.WRONG, Kind.UNUSABLE) for each in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
