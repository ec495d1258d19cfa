"""``smp-launch``: jobs from a shell."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import runpy
import shlex
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from smdistributed.modelparallel.common.errors import ConfigError, SMPError, UnsupportedError
from smdistributed.modelparallel.common.launcher import plan, settings
from smdistributed.modelparallel.launch import names, notebooks
from smdistributed.modelparallel.launch.exceptions import UnexpectedStatusException
from smdistributed.modelparallel.launch.job import folder, whereabouts
from smdistributed.modelparallel.launch.job.status import Status
from smdistributed.modelparallel.launch.request import kubernetes
from smdistributed.modelparallel.launch.session import Session
from smdistributed.modelparallel.launch.storage import places
from smdistributed.modelparallel.launch.storage.places import JOBS_VARIABLE

_USAGE_EXIT_CODE = 2
_INTERRUPTED_EXIT_CODE = 130
_WIDE = 400
_API = "'smp-launch[api]'"
_STYLES = {"Completed": "green", "Failed": "red", "Stopped": "yellow"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``smp-launch``; returns its exit code: 1 if a job that was waited for failed."""
    words = sys.argv[1:] if argv is None else list(argv)
    warnings.showwarning = lambda message, *_, **__: _say(f"note: {message}")
    try:
        if words[:1] == ["plan"]:  # its words after -- are a script's
            return plan.main(words[1:], prog="smp-launch plan")
        arguments = _parser().parse_args(words)
        return int(arguments.run(Session(root=arguments.jobs), arguments) or 0)
    except UnexpectedStatusException as error:
        _say(str(error))
        return 1
    except SMPError as error:
        _say(f"error: {error}")
        return _USAGE_EXIT_CODE
    except KeyboardInterrupt:
        return _INTERRUPTED_EXIT_CODE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smp-launch", description="Shows, starts and ends training jobs.", allow_abbrev=False
    )
    parser.add_argument("--jobs", metavar="FOLDER", help="folder of all jobs (default: SMP_JOBS)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    planning = commands.add_parser(
        "plan", help="say which configurations of a job fit, and which is the fastest"
    )
    planning.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    planning.set_defaults(run=_refuse_plan)
    listing = commands.add_parser("list", help="all jobs, the newest first")
    listing.set_defaults(run=_list)
    for name, run, text in (
        ("show", _show, "a job: its phases, where its results are, why it failed"),
        ("stop", _stop, "ask a job to end; its processes have time to save"),
        ("wait", _wait, "wait for the end of a job"),
        ("logs", _logs, "the log of a job; with --follow until its end"),
        ("where", _where, "where the ranks of a running job are, and whom they wait for"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("job", metavar="JOB")
        command.set_defaults(run=run)
        if name == "logs":
            command.add_argument("-f", "--follow", action="store_true")
    rendering = commands.add_parser(
        "manifest", help="print a job as a TrainJob of Kubeflow's trainer, for Kubernetes"
    )
    rendering.add_argument("--image", required=True, help="with Python, PyTorch and smp-torch")
    rendering.add_argument("--name", default="", help="of the job (default: the script's)")
    rendering.add_argument("--nodes", type=int, default=1, help="pods (default 1)")
    rendering.add_argument("--processes", type=int, default=1, help="of each pod (default 1)")
    rendering.add_argument("--gpus", type=int, help="of each pod (default: one a process)")
    rendering.add_argument("--runtime", default="torch-distributed", help="of the cluster")
    for option, form, text in (
        ("--set", "KEY=VALUE", "one parameter of the library"),
        ("--env", "NAME=VALUE", "a variable of the job"),
        ("--volume", "CLAIM:/PLACE", "a claim of a volume, and where it is mounted"),
    ):
        rendering.add_argument(option, action="append", default=[], metavar=form, help=text)
    rendering.add_argument("program", metavar="SCRIPT")
    rendering.add_argument("arguments", nargs=argparse.REMAINDER)
    rendering.set_defaults(run=_manifest)
    submitting = commands.add_parser("submit", help="start a job that a JSON document describes")
    submitting.add_argument("document", metavar="FILE")
    submitting.set_defaults(run=_submit)
    running = commands.add_parser(
        "run", help="run a script or notebook in which 'import sagemaker' means this package"
    )
    running.add_argument(
        "--sdk", action="store_true", help="leave 'import sagemaker' to the SDK, served as by api"
    )
    running.add_argument(
        "--output", metavar="FILE", help="where the notebook goes with its results"
    )
    running.add_argument("script", metavar="SCRIPT")
    running.add_argument("arguments", nargs=argparse.REMAINDER)
    running.set_defaults(run=_run)
    endpoints = commands.add_parser("endpoints", help="all endpoints, and how they stand")
    endpoints.set_defaults(run=_endpoints)
    deleting = commands.add_parser("delete-endpoint", help="end an endpoint; its model stays")
    deleting.add_argument("endpoint", metavar="ENDPOINT")
    deleting.set_defaults(run=_delete_endpoint)
    serving = commands.add_parser(
        "api", help="serve the service's interface on the loopback, for the SDK and boto3"
    )
    serving.add_argument("--port", type=int, default=0)
    serving.add_argument("command", nargs=argparse.REMAINDER, help="a program to run so")
    serving.set_defaults(run=_serve)
    return parser


def _refuse_plan(_: Session, arguments: argparse.Namespace) -> None:
    raise ConfigError(
        f"a plan has no folder of jobs; received --jobs {arguments.jobs}: leave it out, so that "
        "plan is the first word."
    )


def _list(session: Session, _: argparse.Namespace) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("job", "state", "phase", "started", "took", "experiment"):
        table.add_column(column, overflow="fold" if column == "job" else "ellipsis")
    for job in folder.all_jobs(session.root):
        try:
            status = session.observe(job)
            config = job.request().experiment_config
        except (SMPError, OSError, ValueError):
            table.add_row(job.name, "[red]unreadable[/]")
            continue
        table.add_row(
            job.name,
            _styled(status),
            status.secondary_status,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(status.creation_time)),
            _duration(status),
            (config.experiment_name if config else None) or "",
        )
    if table.row_count:
        _console().print(table)
    else:
        print(f"no jobs in {session.root}")


def _show(session: Session, arguments: argparse.Namespace) -> None:
    job = session.job(arguments.job)
    status, request = session.observe(job), job.request()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("job", job.name)
    table.add_row("state", _styled(status))
    hosts = request.resource_config
    table.add_row("hosts", f"{hosts.instance_count} x {hosts.instance_type}")
    if config := request.experiment_config:
        table.add_row("experiment", config.experiment_name)
        table.add_row("trial", config.trial_name)
    for phase in status.secondary_status_transitions:
        at = time.strftime("%H:%M:%S", time.localtime(phase.start_time))
        took = f" ({(phase.end_time or time.time()) - phase.start_time:.1f} s)"
        table.add_row(at, f"{phase.status}{took} {phase.status_message}")
    for metric in status.final_metric_data_list:
        table.add_row(str(metric["MetricName"]), f"{metric['Value']:g}")
    if status.model_artifacts:
        table.add_row("model", status.model_artifacts.s3_model_artifacts)
    table.add_row("folder", str(job.path))
    if status.failure_reason:
        table.add_row("reason", status.failure_reason)
    _console().print(table)


def _stop(session: Session, arguments: argparse.Namespace) -> None:
    session.stop_training_job(arguments.job)
    state = session.observe(session.job(arguments.job)).training_job_status
    if state in _STYLES:
        print(f"{arguments.job} has ended: {state}")
    else:
        print(f"{arguments.job} was asked to end: 'smp-launch logs -f {arguments.job}' follows it")


def _wait(session: Session, arguments: argparse.Namespace) -> None:
    session.wait_for_job(arguments.job)


def _logs(session: Session, arguments: argparse.Namespace) -> None:
    session.logs_for_job(arguments.job, wait=arguments.follow)


def _where(session: Session, arguments: argparse.Namespace) -> None:
    sys.stdout.write(whereabouts.told(session.job(arguments.job)))


def _submit(session: Session, arguments: argparse.Namespace) -> None:
    try:
        request = json.loads(Path(arguments.document).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"a job is described by a JSON file; {error}: correct it.") from None
    if not isinstance(request, dict):
        raise ConfigError(f"{arguments.document} must have a JSON object: the request of a job.")
    print(session.start(request).name)


def _manifest(_: Session, given: argparse.Namespace) -> None:
    manifest = kubernetes.Manifest(
        program=(given.program, *given.arguments),
        image=given.image,
        name=given.name,
        nodes=given.nodes,
        processes=given.processes,
        gpus=given.gpus,
        runtime=given.runtime,
        parameters=dict(settings.parse_setting(text) for text in given.set),
        environ=kubernetes.pairs(given.env, "=", "--env"),
        volumes=kubernetes.pairs(given.volume, ":", "--volume"),
    )
    sys.stdout.write(manifest.text())


def _endpoints(session: Session, _: argparse.Namespace) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("endpoint", "state", "since", "reason"):
        table.add_column(column, overflow="fold")
    for name in session.serving.endpoints():
        status = session.serving.endpoint(name)
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.creation_time))
        table.add_row(name, status.endpoint_status, since, status.failure_reason or "")
    if table.row_count:
        _console().print(table)
    else:
        print(f"no endpoints in {session.root}")


def _delete_endpoint(session: Session, arguments: argparse.Namespace) -> None:
    config = session.serving.endpoint(arguments.endpoint).endpoint_config_name
    session.delete_endpoint(arguments.endpoint)
    session.delete_endpoint_config(config)


def _console() -> Console:
    """Returns where tables go; what reads them without a terminal gets each row in one line."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDE)


def _run(session: Session, arguments: argparse.Namespace) -> int:
    script = Path(arguments.script)
    if script.suffix not in (".py", ".ipynb") or not script.is_file():
        raise ConfigError(f"what is run is a Python file or a notebook; got {script}: give one.")
    os.environ[JOBS_VARIABLE] = str(session.root)
    with _service(session, is_needed=arguments.sdk):
        if script.suffix == ".ipynb":
            kept = Path(arguments.output) if arguments.output else None
            if not arguments.sdk:
                _say("sagemaker names this machine in the notebook")
            notebooks.run(script, kept, with_names=not arguments.sdk)
            return 0
        if arguments.sdk:
            words = [sys.executable, str(script), *arguments.arguments]
            return subprocess.run(words, env=os.environ, check=False).returncode
        names.install()
        sys.argv = [str(script), *arguments.arguments]
        sys.path.insert(0, str(script.absolute().parent))
        runpy.run_path(str(script), run_name="__main__")
    return 0


def _service(session: Session, *, is_needed: bool) -> contextlib.AbstractContextManager[object]:
    """Serves the interface to what runs below: boto3 is then of this machine too."""
    if not is_needed and importlib.util.find_spec("boto3") is None:
        return contextlib.nullcontext()
    if not is_needed and places.has_object_store():
        _say("boto3 is left alone: the settings of an object store are there")
        return contextlib.nullcontext()
    service: contextlib.AbstractContextManager[object] = _server().serving(session)
    return service


def _server() -> Any:
    """Returns what serves the interface.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        from smdistributed.modelparallel.launch.api import server
    except ImportError as error:
        raise UnsupportedError(
            f"the interface needs {error.name}, which is not installed: pip install {_API}."
        ) from None
    return server


def _serve(session: Session, arguments: argparse.Namespace) -> int:
    command = [word for word in arguments.command if word != "--"]
    with _server().serving(session, arguments.port) as variables:
        if command:
            return subprocess.run(command, env=os.environ, check=False).returncode
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}", flush=True)
        _say(f"serving until ctrl-c; the object store is {session.root / places.OBJECT_STORE}")
        threading.Event().wait()
    return 0


def _styled(status: Status) -> str:
    state = status.training_job_status
    return f"[{_STYLES.get(state, 'cyan')}]{state}[/]"


def _duration(status: Status) -> str:
    seconds = (status.training_end_time or time.time()) - status.creation_time
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02}"


def _say(text: str) -> None:
    sys.stderr.write(f"smp-launch: {text}\n")
