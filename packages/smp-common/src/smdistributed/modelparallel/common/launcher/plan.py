"""Planning a job before there are devices: which configurations fit, and which is the fastest.

The script runs as one process up to its first training step, which is recorded and not run. What
that process writes is searched here, without a framework.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.common.config.schema import names
from smdistributed.modelparallel.common.errors import ConfigError, SMPError, UnsupportedError
from smdistributed.modelparallel.common.launcher.framework import guess
from smdistributed.modelparallel.common.launcher.hosts import (
    LOCAL_HOST,
    Host,
    parse_host_list,
    place,
)
from smdistributed.modelparallel.common.planning.report import timeline_svg
from smdistributed.modelparallel.common.search import tables
from smdistributed.modelparallel.common.search.candidates import Configuration
from smdistributed.modelparallel.common.search.devices import DEVICES, Machine, device_of
from smdistributed.modelparallel.common.search.profile import PROFILE_VARIABLE, ModelProfile
from smdistributed.modelparallel.common.search.ranking import Plan, Search

_NOTHING_FITS_EXIT_CODE = 1
_NO_TERMINAL_WIDTH = 120
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{letter}iB": 1 << 10 * power for power, letter in enumerate("KMGT", 1)
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]i?B)")


@dataclass(frozen=True)
class Request:
    """What is planned.

    Attributes:
        program: the script, or ``-m`` and a module, and its arguments.
        hosts: with their processes.
        machine: the devices on them.
        num_lines: of the table, at most.
        explained: the line whose step is drawn; None for none.
        json_file: where the plan goes for programs; None for nowhere.
        parameters: of the library, that the job is given besides those of the plan.
    """

    program: tuple[str, ...]
    hosts: tuple[Host, ...]
    machine: Machine
    num_lines: int = 10
    explained: int | None = None
    json_file: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


def main(argv: Sequence[str], *, prog: str) -> int:
    """Runs the command; returns its exit code: 1 if nothing fits.

    Args:
        argv: its words; the script's own follow ``--``.
        prog: what the command is called.

    Raises:
        SMPError: nothing can be planned.
    """
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    arguments = _parser(prog).parse_args(words[:at])
    script = arguments.script
    if not os.path.isfile(script):
        raise ConfigError(f"what is planned is a Python file; there is no file {script}: name one.")
    if not (arguments.devices or arguments.hosts):
        raise ConfigError("a plan is for a number of devices: give --devices, or --hosts a:8,b:8.")
    if arguments.lines < 1:
        raise ConfigError(f"--lines is a number of at least 1; received {arguments.lines}.")
    hosts = place(parse_host_list(arguments.hosts) if arguments.hosts else (), arguments.devices)
    request = Request(
        (script, *words[at + 1 :]),
        hosts,
        machine_of(hosts, arguments.device, arguments.memory),
        arguments.lines,
        arguments.explain,
        arguments.json,
    )
    return run(request, os.environ)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} SCRIPT --devices N [options] [-- arguments of the script]",
        description="Says which configurations of a training job fit, and estimates which is the "
        "fastest. The script runs up to its first training step, which is not computed.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("script", metavar="SCRIPT", help="a training script of PyTorch")
    add("--devices", type=int, metavar="N", help="devices of the job, one for each process")
    add("--hosts", metavar="A:8,B:8", help="hosts, with their devices (default: this host)")
    add("--device", default="h100", metavar="NAME", help=f"one of {', '.join(DEVICES)}")
    add("--memory", metavar="80GiB", help="of a device (default: as its data sheet has it)")
    add("--lines", type=int, default=10, metavar="N", help="lines of the table (default 10)")
    add("--explain", type=int, metavar="LINE", help="draw the step of a line: plan-LINE.svg")
    add("--json", metavar="FILE", help="write the plan there for programs")
    return parser


def machine_of(hosts: Sequence[Host], device: str, memory: str | None) -> Machine:
    """Returns the devices of a job.

    Args:
        hosts: with their processes.
        device: name of their kind.
        memory: of each, as a user writes it; None for what the table says.

    Raises:
        ConfigError: the planner has no such device, or its memory is not known.
    """
    numbers = {host.slots or 0 for host in hosts}
    if len(numbers) > 1:
        raise ConfigError(
            "a plan is for hosts that have equally many devices; received "
            f"{','.join(f'{host.name}:{host.slots}' for host in hosts)}: name those that do."
        )
    kind = device_of(device)
    if memory is None and kind.memory_bytes is None:
        raise ConfigError(f"the memory of a {device} is not known: give it, as in --memory 4GiB.")
    num_bytes = kind.memory_bytes if memory is None else parse_bytes(memory)
    assert num_bytes is not None
    return Machine(kind, sum(host.slots or 0 for host in hosts), len(hosts), num_bytes)


def parse_bytes(text: str) -> int:
    """Reads a size as a user writes it.

    Raises:
        ConfigError: it is none.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match["number"]):
        raise ConfigError(
            f"memory is a number above 0 and a unit; received {text!r}: write 80GiB or 80GB."
        )
    return int(float(match["number"]) * _UNITS[match["unit"]])


def run(request: Request, environ: Mapping[str, str]) -> int:
    """Records the step, plans, and shows the plan; returns the exit code.

    Args:
        request: what is planned.
        environ: environment of the script.

    Raises:
        SMPError: nothing can be planned.
    """
    began = time.perf_counter()
    profile = recorded(request.program, environ)
    recorded_at = time.perf_counter()
    search = Search(profile, request.machine)
    plan = search.plan(request.num_lines)
    took = recorded_at - began, time.perf_counter() - recorded_at
    _show(request, profile, plan)
    print(f"took {took[0]:.1f} s to the first training step, {took[1]:.1f} s to search")
    if request.json_file is not None:
        text = tables.as_json(plan, profile, request.machine, _commands(request, profile))
        Path(request.json_file).write_text(text, encoding="utf-8")
        print(f"wrote {request.json_file}")
    if request.explained is not None:
        _explain(request.explained, search, plan)
    return 0 if plan.best else _NOTHING_FITS_EXIT_CODE


def recorded(program: Sequence[str], environ: Mapping[str, str]) -> ModelProfile:
    """Runs a script up to its first training step, and returns the profile of that.

    Raises:
        UnsupportedError: it is a script of TensorFlow.
        SMPError: it does not come to such a step.
    """
    if guess(program) == "tensorflow":
        raise UnsupportedError(
            f"the planner plans for scripts of PyTorch; {program[0]} is one of TensorFlow: see "
            "the page 'Choose degrees'."
        )
    with tempfile.TemporaryDirectory(prefix="smp-plan-") as folder:
        file = Path(folder) / "profile.json"
        command = [sys.executable, *program]
        done = subprocess.run(command, env={**environ, PROFILE_VARIABLE: str(file)}, check=False)
        if file.exists():
            return ModelProfile.from_json(file.read_text(encoding="utf-8"))
    if done.returncode:
        raise SMPError(
            f"the script must come to its first training step; {shlex.join(program)} ended before "
            f"with exit code {done.returncode}: run it as one process, and mend what it says."
        )
    raise SMPError(
        f"the script must come to a training step; {shlex.join(program)} ended without one: call "
        "a function under @smp.step, and model.backward in it."
    )


def _commands(request: Request, profile: ModelProfile) -> tables.CommandOf:
    main_names = names(Config)

    def command(configuration: Configuration) -> list[str]:
        words = ["smprun", "-n", str(request.machine.num_devices)]
        if [host.name for host in request.hosts] != [LOCAL_HOST]:
            words += ["--hosts", ",".join(f"{host.name}:{host.slots}" for host in request.hosts)]
        given = {main_names.get(name, name): value for name, value in request.parameters.items()}
        for name, value in {**given, **configuration.settings(profile)}.items():
            text = value if isinstance(value, str) else json.dumps(value)
            words += ["--set", f"{name}={text}"]
        return [*words, *request.program]

    return command


def _show(request: Request, profile: ModelProfile, plan: Plan) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = _NO_TERMINAL_WIDTH
    say = functools.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    for line in tables.summary(profile, request.machine, plan):
        say(line)
    say()
    if plan.best:
        console.print(tables.ranking(plan), highlight=False)
    for line in tables.refusals(plan):
        say(line)
    say()
    command_of = _commands(request, profile)
    for number, each in enumerate(plan.best, 1):
        # One line however long, to be copied.
        say(f"{number}: {shlex.join(command_of(each.configuration))}")


def _explain(line: int, search: Search, plan: Plan) -> None:
    if not 1 <= line <= len(plan.best):
        raise ConfigError(
            f"--explain takes a line of the table, 1 to {len(plan.best)}; received {line}."
        )
    chosen = plan.best[line - 1]
    file = Path(f"plan-{line}.svg")
    timeline = search.timeline(chosen.configuration)
    file.write_text(timeline_svg(timeline, f"Line {line}, as simulated"), encoding="utf-8")
    for rank, memory in enumerate(chosen.memory):
        print(f"partition {rank}: {tables.why(memory)}")
    print(f"wrote {file}")
