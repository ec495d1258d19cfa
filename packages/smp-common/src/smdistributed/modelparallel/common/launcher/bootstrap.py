"""What each rank of an smprun job runs: the user's program, with failures reported at once.

``bootstrap script.py args`` and ``bootstrap -m module args`` behave as ``python`` with the same
words does: ``sys.argv``, ``sys.path[0]`` and ``__main__`` are the program's own.
"""

from __future__ import annotations

import builtins
import json
import os
import runpy
import sys
from collections.abc import MutableMapping
from pathlib import Path
from types import ModuleType, TracebackType

from smdistributed.modelparallel.common import failure, first_stderr, whereabouts
from smdistributed.modelparallel.common.launcher import standard_input
from smdistributed.modelparallel.common.launcher.ending import EndRequest, say_at_end
from smdistributed.modelparallel.common.launcher.listening import (
    END_SIGNAL,
    STATUS_SIGNAL,
    listen,
)

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "RANK")
_SIZE_VARIABLE = "OMPI_COMM_WORLD_SIZE"
_LOCAL_RANK_VARIABLE = "OMPI_COMM_WORLD_LOCAL_RANK"
_LOCAL_SIZE_VARIABLE = "OMPI_COMM_WORLD_LOCAL_SIZE"
#: Whose value has, by the names of hosts, the variables that are otherwise there than on the first.
HOSTS_VARIABLE = "SMP_HOST_VARIABLES"
_OWN_FILES = (__file__, runpy.__file__, "<frozen runpy>")


def rank() -> int:
    """Returns the global rank as the launcher put it into the environment; 0 without one."""
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), 0)


def name_host(environ: MutableMapping[str, str]) -> None:
    """Corrects ``SM_CURRENT_HOST`` and its like, which mpirun hands on as on the first host.

    ``SM_HOSTS`` lists the hosts in the order of ranks, and each has as many. Where several are
    parts of one machine, local ranks are counted in each of them, as on hosts of their own.
    """
    try:
        hosts = json.loads(environ["SM_HOSTS"])
        share, rest = divmod(int(environ[_SIZE_VARIABLE]), len(hosts))
    except (KeyError, ValueError, TypeError, ZeroDivisionError):
        return  # nobody has named hosts, or in another way than launchers do
    if share and not rest:
        number, local_rank = divmod(rank(), share)
        name = str(hosts[number])
        environ["SM_CURRENT_HOST"] = name
        environ[_LOCAL_RANK_VARIABLE] = str(local_rank)
        environ[_LOCAL_SIZE_VARIABLE] = str(share)
        environ.update(json.loads(environ.get(HOSTS_VARIABLE, "{}")).get(name, {}))


def run(program: list[str]) -> object:
    """Runs the program as ``__main__``.

    Returns:
        What has to live as long as the interpreter: exit handlers and threads of the program may
        still use its globals.
    """
    if program[0] == "-m":
        sys.argv = program[1:]
        return runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    sys.argv = program
    path = os.path.abspath(program[0])
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    # runpy.run_path would put one path into both argv[0] and __file__, and take __main__ away
    # before the exit handlers run.
    main_module = ModuleType("__main__")
    vars(main_module).update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = main_module
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(main_module))
    return main_module


def without_own_frames(tb: TracebackType | None) -> TracebackType | None:
    """Returns the traceback from the program's first frame on."""
    while tb is not None and tb.tb_frame.f_code.co_filename in _OWN_FILES:
        tb = tb.tb_next
    return tb


def main() -> object:
    """Runs the program that the command line names; see ``run``.

    A program that was asked to end ends well, whatever code it leaves with: mpirun would otherwise
    take the others' time to save from them.
    """
    first_stderr.keep()
    request = EndRequest()
    listen({END_SIGNAL: request.come, STATUS_SIGNAL: lambda: whereabouts.answer(rank())})
    say_at_end()
    name_host(os.environ)
    if rank() == 0:
        standard_input.take(os.environ)
    with failure.guarded(rank):
        try:
            return run(sys.argv[1:])
        except SystemExit:
            if request.has_come:
                sys.exit(0)
            raise
        except (Exception, KeyboardInterrupt) as error:
            failure.leave_for_exception(
                rank(), error.with_traceback(without_own_frames(error.__traceback__))
            )


if __name__ == "__main__":
    kept = main()
