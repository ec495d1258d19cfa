"""The command line of smprun."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from smdistributed.modelparallel.common.config import ConfigWarning
from smdistributed.modelparallel.common.errors import ConfigError, SMPError
from smdistributed.modelparallel.common.launcher import (
    copies,
    flight_recorder,
    job,
    restarts,
    roll_call,
    settings,
    status,
)
from smdistributed.modelparallel.common.launcher.command import (
    Job,
    build_command,
    build_roll_call,
    find_mpirun,
    job_environment,
)
from smdistributed.modelparallel.common.launcher.elastic import Placement
from smdistributed.modelparallel.common.launcher.first_failure import Verdict
from smdistributed.modelparallel.common.launcher.framework import guess
from smdistributed.modelparallel.common.launcher.hosts import (
    LOCAL_HOST,
    Host,
    host_of_ranks,
    parse_host_list,
    parse_hostfile,
    place,
)
from smdistributed.modelparallel.common.launcher.mpi_options import MpiOptions, translate
from smdistributed.modelparallel.common.launcher.slurm import allocated_hosts
from smdistributed.modelparallel.common.search.devices import DEVICES

_USAGE_EXIT_CODE = 2
_BROKEN_PIPE_EXIT_CODE = 141
_COPIES = "; copies of one that has imported the framework (--no-fork: each imports it itself)"
_FLAGS = ("-h", "--help", "--dry-run", "--fork", "--no-fork")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``smprun``; returns its exit code.

    The code is 0 when every process ended well, that of the first failing process otherwise
    (128+n for signal n), in the last attempt where there are several, 2 when the command line or
    the configuration is wrong, and 124 after ``--timeout``.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", ConfigWarning)
            warnings.showwarning = _show_warning
            return _run(sys.argv[1:] if argv is None else list(argv))
    except SMPError as error:
        _say(f"error: {error}")
        return _USAGE_EXIT_CODE
    except BrokenPipeError:
        # The reader of our output left. What the interpreter still flushes goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE_EXIT_CODE


def split_arguments(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Returns smprun's own options, each joined to its value, and the program with its arguments.

    The program starts at the first word that is no option, or at ``-m``; what follows is its own.
    """
    own: list[str] = []
    words = list(argv)
    while words and words[0].startswith("-") and words[0] != "-m":
        option = words.pop(0)
        joined = "=" in option or option in _FLAGS or (option[1] != "-" and len(option) > 2)
        if not joined and words:
            separator = "=" if option.startswith("--") else ""
            option += separator + words.pop(0)
        own.append(option)
    return own, tuple(words)


def _run(argv: list[str]) -> int:
    own, program = split_arguments(argv)
    parser = _parser()
    arguments = parser.parse_args(own)
    if arguments.status is not None:
        if len(own) > 1 + bool(arguments.flight_recorder) or program:
            parser.error("--status takes the process id of a running smprun, and nothing else")
        told = status.told_by(arguments.status)
        sys.stdout.write(told.text)
        if arguments.flight_recorder:
            flight_recorder.write(told, Path(arguments.flight_recorder))
        return 0
    if arguments.flight_recorder:
        parser.error("--flight-recorder is for what a running job answers: give --status too")
    _check_program(parser, program)

    file = settings.ConfigFile()
    if arguments.config:
        file = settings.read_config_file(arguments.config)
    options = translate(" ".join([file.custom_mpi_options, *arguments.mpi_args]))
    named, num_ranks = _named(arguments, options, file.processes_per_host)
    hosts = place(named, num_ranks)
    num_ranks = len(host_of_ranks(hosts))
    if arguments.memory and not arguments.plan:
        parser.error("--memory is that of a device that is planned for: give --plan too")

    merged = settings.merge(
        os.environ, file.parameters, [settings.parse_setting(text) for text in arguments.set]
    )
    if arguments.plan:
        # Plans and pictures, and the tables in which they are shown, are a third of all imports.
        from smdistributed.modelparallel.common.launcher import plan

        request = plan.Request(
            program, hosts, arguments.plan, arguments.memory, parameters=merged.parameters
        )
        return plan.run(request, settings.launch_environment(os.environ, merged))
    num_cores = len(os.sched_getaffinity(0))
    environ, remark = job_environment(
        settings.launch_environment(os.environ, merged),
        hosts,
        options,
        num_cores,
        is_terminal=sys.stdout.isatty(),
    )
    framework = arguments.framework or guess(program)
    config, doubt = settings.check(framework, environ, num_ranks, _per_host(hosts))
    copied = not arguments.fork_from and copies.are_wanted(
        arguments.fork, hosts, program, environ, num_cores
    )
    if copied and arguments.fork is None:
        remark = f"{remark or f'{num_ranks} processes on {num_cores} cores'}{_COPIES}"
    for text in (remark, doubt and f"warning: {doubt}"):
        if text:
            _say(text)

    described = Job(hosts, options, program, environ, arguments.fork_from)
    mpirun, as_root = find_mpirun(), os.geteuid() == 0
    command_of = partial(build_command, mpirun=mpirun, as_root=as_root, num_cores=num_cores)
    calling = partial(build_roll_call, mpirun=mpirun, as_root=as_root, num_cores=num_cores)
    if arguments.dry_run:
        from smdistributed.modelparallel.common.launcher import dry_run

        shown = replace(described, copied_from="ADDRESS") if copied else described
        dry_run.show(hosts, config, merged.sources, command_of(shown))
        return 0
    limits = job.Limits(arguments.timeout, arguments.grace)

    def silent(asked: Sequence[Host]) -> frozenset[str]:
        return roll_call.silent(
            asked, lambda some: calling(replace(described, hosts=tuple(some))), environ
        )

    placement = Placement(named, hosts, framework, config.given(), silent)

    def attempt(variables: Mapping[str, str]) -> Verdict:
        own = placement.environment({**environ, **variables})
        started = replace(described, hosts=placement.start.hosts, environ=own)
        with contextlib.ExitStack() as stack:
            if copied:
                source = copies.of_one_process(
                    started, framework, is_asked=bool(arguments.fork), say=_say
                )
                started = stack.enter_context(source)
            command, ranks = command_of(started), host_of_ranks(started.hosts)
            return job.run(command, started.environ, ranks, limits, placement.take)

    return restarts.run(attempt, arguments.restarts, placement.renew)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smprun",
        usage="smprun [options] (script.py | -m module) [arguments]",
        description="Starts a Python program on several processes, shows their output by rank, "
        "and ends them all when one fails.",
        epilog="Options stand before the program; what follows it belongs to the program.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", dest="num_ranks", type=int, metavar="N", help="number of processes, over all hosts")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="A:4,B:4", help="hosts, with their processes")
    where.add_argument("--hostfile", metavar="FILE", help="hosts, one a line: name slots=4")
    add("--config", metavar="FILE", help="configuration of the library, YAML or JSON")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one parameter of the configuration; beats --config; may be repeated",
    )
    add(
        "--framework",
        choices=("pytorch", "tensorflow"),
        help="whose parameters the configuration has (default: what the program imports, else "
        "what is installed)",
    )
    add(
        "--mpi-args",
        action="append",
        default=[],
        metavar="OPTIONS",
        help="options for mpirun in one word; those of Open MPI 4 are translated",
    )
    add("--timeout", type=_seconds, metavar="SECONDS", help="end the job after this time")
    add(
        "--grace",
        type=_seconds_or_none,
        default=120.0,
        metavar="SECONDS",
        help="on SIGTERM, give ranks that handle it this time to save and end (default 120)",
    )
    add(
        "--restarts",
        type=_count,
        default=0,
        metavar="N",
        help="start the job again when it has lost a rank, at most N times, on the hosts that "
        "answer; the script resumes",
    )
    add(
        "--fork",
        action=argparse.BooleanOptionalAction,
        help="import the library and its framework once, and start each process as a copy; on one "
        "host (default: where that has fewer cores than processes, and no GPU)",
    )
    # For tests, which keep such a process.
    add("--fork-from", default="", help=argparse.SUPPRESS)
    add("--dry-run", action="store_true", help="show what would run, and start nothing")
    add(
        "--plan",
        metavar="DEVICE",
        help="start nothing, but list the configurations that fit such devices: "
        f"{', '.join(DEVICES)}",
    )
    add(
        "--status",
        type=_count,
        metavar="PID",
        help="start nothing, but show where the ranks of the smprun with this process id are",
    )
    add(
        "--flight-recorder",
        metavar="FOLDER",
        help="with --status: also write whom each rank waits for as files that the analyzer of "
        "PyTorch's flight recorder reads",
    )
    add("--memory", metavar="80GiB", help="with --plan: of a device")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0; received {text}")
    return value


def _seconds_or_none(text: str) -> float:
    return 0.0 if text == "0" else _seconds(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or above; received {text}")
    return int(text)


def _check_program(parser: argparse.ArgumentParser, program: Sequence[str]) -> None:
    if not program:
        parser.error("no program given: end the line with a script, or with -m and a module")
    if program[0] == "-m":
        if len(program) == 1:
            parser.error("-m needs the name of a module")
    elif not os.path.isfile(program[0]):
        raise ConfigError(
            f"the program must be a Python file; there is no file {program[0]} in {os.getcwd()}."
        )


def _named(
    arguments: argparse.Namespace, options: MpiOptions, processes_per_host: int | None
) -> tuple[tuple[Host, ...], int | None]:
    """Returns the hosts that the job may use and its number of processes, as far as asked for."""
    num_ranks = arguments.num_ranks
    if num_ranks is None:
        num_ranks = options.num_ranks
    elif options.num_ranks not in (None, num_ranks):
        raise ConfigError(
            f"-n must agree with the MPI options; received {num_ranks} and {options.num_ranks}: "
            "leave it out of one of them."
        )
    hosts: tuple[Host, ...] = ()
    if arguments.hostfile:
        hosts = parse_hostfile(_read(arguments.hostfile), arguments.hostfile)
    elif listed := arguments.hosts or options.hosts:
        hosts = parse_host_list(listed)
    else:
        hosts = allocated_hosts(os.environ, num_ranks)
        if processes_per_host and num_ranks is None:
            hosts = tuple(Host(host.name) for host in hosts)
    if num_ranks is None and processes_per_host:
        hosts = tuple(
            Host(host.name, host.slots or processes_per_host) for host in hosts or _here()
        )
    return hosts, num_ranks


def _here() -> tuple[Host, ...]:
    return (Host(LOCAL_HOST),)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the host file must be readable; {path}: {error}") from None


def _per_host(hosts: Sequence[Host]) -> int | None:
    """Returns the number of processes of each host where they agree."""
    numbers = {host.slots for host in hosts}
    return numbers.pop() if len(numbers) == 1 else None


def _say(text: str) -> None:
    sys.stderr.write(f"smprun: {text}\n")
    sys.stderr.flush()


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    _say(f"warning: {message}")
