"""Planning a job before there are devices: which configurations fit, and which is the fastest.

The script runs as one process up to its first training step, which is recorded and not run. What
that process writes is searched here, without a framework.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.common.config.schema import names
from smdistributed.modelparallel.common.errors import ConfigError, SMPError
from smdistributed.modelparallel.common.launcher.hosts import (
    LOCAL_HOST,
    Host,
    parse_host_list,
    place,
)
from smdistributed.modelparallel.common.launcher.measuring import measured
from smdistributed.modelparallel.common.planning.report import timeline_svg
from smdistributed.modelparallel.common.search import tables
from smdistributed.modelparallel.common.search.devices import (
    DEVICES,
    USUAL_DEVICE,
    Machine,
    device_like,
)
from smdistributed.modelparallel.common.search.measurement import Calibrations
from smdistributed.modelparallel.common.search.plan import CommandOf, Line, Plan
from smdistributed.modelparallel.common.search.profile import (
    PROFILE_DEVICE_VARIABLE,
    PROFILE_VARIABLE,
    ModelProfile,
)

_NOTHING_FITS_EXIT_CODE = 1


@dataclass(frozen=True)
class Request:
    """What is planned.

    Attributes:
        program: the script, or ``-m`` and a module, and its arguments.
        hosts: with their processes.
        device: name of the kind of device on them; "" for that of this host, where it has GPUs.
        memory: of each, as a user writes it; None for what the table says.
        num_lines: of the table, at most.
        explained: the line whose step is drawn; None for none.
        json_file: where the plan goes for programs; None for nowhere.
        html_file: where it goes as a page; likewise.
        parameters: of the library, that the job is given besides those of the plan.
        num_measured: lines that are run for some steps.
    """

    program: tuple[str, ...]
    hosts: tuple[Host, ...]
    device: str = ""
    memory: str | None = None
    num_lines: int = 10
    explained: int | None = None
    json_file: str | None = None
    html_file: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    num_measured: int = 0

    def __post_init__(self) -> None:
        machine_of(self.hosts, self.device or USUAL_DEVICE, self.memory)  # raises early

    def machine(self, profile: ModelProfile) -> Machine:
        """Returns the devices of the job.

        Args:
            profile: of the model, which may have been timed on the GPU of this host.
        """
        device = self.device or profile.timed_on or USUAL_DEVICE
        return machine_of(self.hosts, device, self.memory)


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
    if arguments.measure < 0:
        raise ConfigError(f"--measure is a number of lines; received {arguments.measure}.")
    if arguments.lines < 1:
        raise ConfigError(f"--lines is a number of at least 1; received {arguments.lines}.")
    hosts = place(parse_host_list(arguments.hosts) if arguments.hosts else (), arguments.devices)
    request = Request(
        (script, *words[at + 1 :]),
        hosts,
        arguments.device or "",
        arguments.memory,
        arguments.lines,
        arguments.explain,
        arguments.json,
        arguments.html,
        num_measured=arguments.measure,
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
    add("script", metavar="SCRIPT", help="a training script")
    add("--devices", type=int, metavar="N", help="devices of the job, one for each process")
    add("--hosts", metavar="A:8,B:8", help="hosts, with their devices (default: this host)")
    add(
        "--device",
        metavar="NAME",
        help=f"one of {', '.join(DEVICES)} (default: the GPU of this host, else {USUAL_DEVICE})",
    )
    add("--memory", metavar="80GiB", help="of a device (default: as its data sheet has it)")
    add("--lines", type=int, default=10, metavar="N", help="lines of the table (default 10)")
    add("--explain", type=int, metavar="LINE", help="draw the step of a line: plan-LINE.svg")
    add(
        "--measure",
        type=int,
        default=0,
        metavar="N",
        help="run the best N lines for 10 steps each, on the hosts that are named",
    )
    add("--html", metavar="FILE", help="write the plan there as a page with pictures")
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
    return Machine.of(device, sum(host.slots or 0 for host in hosts), len(hosts), memory)


def run(request: Request, environ: Mapping[str, str]) -> int:
    """Records the step, plans, and shows the plan; returns the exit code.

    Args:
        request: what is planned.
        environ: environment of the script.

    Raises:
        SMPError: nothing can be planned.
    """
    began = time.perf_counter()
    profile = recorded(request.program, environ, request.device)
    recorded_at = time.perf_counter()
    machine = request.machine(profile)
    calibrations, device = Calibrations(), machine.device.name
    factor = calibrations.factor(profile, device)
    plan = Plan(profile, machine, request.num_lines, factor)
    took = recorded_at - began, time.perf_counter() - recorded_at
    command_of = functools.partial(_command, request)
    _show(plan, command_of)
    print(f"took {took[0]:.1f} s to the first training step, {took[1]:.1f} s to search")
    if request.json_file is not None:
        plan.save(request.json_file, command_of)
        print(f"wrote {request.json_file}")
    if request.html_file is not None and plan.lines:
        Path(request.html_file).write_text(plan.page(), encoding="utf-8")
        print(f"wrote {request.html_file}")
    if request.explained is not None:
        _explain(request.explained, plan)
    if plan.lines and request.num_measured:
        longer = _measure(request, plan, machine, profile.step, environ)
        calibrations.keep(profile, device, longer * (1.0 if factor is None else factor))
        print(
            f"steps took {longer:.3g} times what was planned; {calibrations.file} keeps that for "
            "later plans of this model"
        )
    return 0 if plan.lines else _NOTHING_FITS_EXIT_CODE


def _measure(
    request: Request, plan: Plan, machine: Machine, step: str, environ: Mapping[str, str]
) -> float:
    """Runs the best lines, and returns how much longer they take than planned, in the middle.

    Raises:
        SMPError: a line fails, or runs on another kind of device than was planned for.
    """
    ratios = []
    print("\nline  predicted ms  measured ms")
    for number, line in enumerate(plan.lines[: request.num_measured], 1):
        found = measured(_command(request, line), step, environ)
        if device_like(found.device) != machine.device:
            raise ConfigError(
                f"lines are measured on what they are planned for, {machine.device.name}; "
                f"this job ran on {found.device}: plan for that with --device, or leave "
                "--measure out."
            )
        ratios.append(found.seconds / line.step_seconds)
        predicted, taken = 1e3 * line.step_seconds, 1e3 * found.seconds
        print(f"{number:4}  {predicted:12.1f}  {taken:11.1f}", flush=True)
    return statistics.median(ratios)


def recorded(program: Sequence[str], environ: Mapping[str, str], device: str = "") -> ModelProfile:
    """Runs a script up to its first training step, and returns the profile of that.

    Args:
        program: the script, and its arguments.
        environ: its environment.
        device: the kind that is planned for; operations are timed if this host has it. "" for the
            GPU of this host, if it has one.

    Raises:
        SMPError: it does not come to such a step.
    """
    with tempfile.TemporaryDirectory(prefix="smp-plan-") as folder:
        file = Path(folder) / "profile.json"
        command = [sys.executable, *program]
        asked = {PROFILE_VARIABLE: str(file), PROFILE_DEVICE_VARIABLE: device}
        done = subprocess.run(command, env={**environ, **asked}, check=False)
        if file.exists():
            return ModelProfile.from_json(file.read_text(encoding="utf-8"))
    if done.returncode:
        raise SMPError(
            f"the script must come to its first training step; {shlex.join(program)} ended before "
            f"with exit code {done.returncode}: run it as one process, and mend what it says."
        )
    raise SMPError(
        f"the script must come to a training step; {shlex.join(program)} ended without one: call "
        "a function under @smp.step, and ask for gradients in it."
    )


def _command(request: Request, line: Line) -> list[str]:
    """Returns the words of the command that starts a line of the plan."""
    words = ["smprun", "-n", str(sum(host.slots or 0 for host in request.hosts))]
    if [host.name for host in request.hosts] != [LOCAL_HOST]:
        words += ["--hosts", ",".join(f"{host.name}:{host.slots}" for host in request.hosts)]
    main_names = names(Config)
    given = {main_names.get(name, name): value for name, value in request.parameters.items()}
    for name, value in {**given, **line.changes}.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words += ["--set", f"{name}={text}"]
    return [*words, *request.program]


def _show(plan: Plan, command_of: CommandOf) -> None:
    is_terminal = sys.stdout.isatty()
    print(plan.table(shutil.get_terminal_size().columns if is_terminal else tables.WIDTH))
    print()
    for number, line in enumerate(plan.lines, 1):
        # One line however long, to be copied.
        print(f"{number}: {shlex.join(command_of(line))}")


def _explain(number: int, plan: Plan) -> None:
    if not 1 <= number <= len(plan.lines):
        raise ConfigError(
            f"--explain takes a line of the table, 1 to {len(plan.lines)}; received {number}."
        )
    line = plan.lines[number - 1]
    file = Path(f"plan-{number}.svg")
    picture = timeline_svg(plan.timeline(line), f"Line {number}, as simulated")
    file.write_text(picture, encoding="utf-8")
    for rank, memory in enumerate(line.memory):
        print(f"partition {rank}: {tables.why(memory)}")
    print(f"wrote {file}")
