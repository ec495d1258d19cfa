"""Ranks that are copies of one process, which has imported what all of them need.

Of many processes on few cores, imports are most of the start and of the memory: 2.5 s of CPU and
200 MiB each. So where processes outnumber the cores of a host without GPUs, they are copies unless
the user says otherwise. See ``fork_server``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from smdistributed.modelparallel.common.config import Framework
from smdistributed.modelparallel.common.errors import ConfigError, SMPError
from smdistributed.modelparallel.common.launcher import framework
from smdistributed.modelparallel.common.launcher.command import HASH_VARIABLE, Job
from smdistributed.modelparallel.common.launcher.fork_client import ForkServer
from smdistributed.modelparallel.common.launcher.gpus import usable_gpus
from smdistributed.modelparallel.common.launcher.hosts import LOCAL_HOST, Host

#: What is imported once.
_IMPORTED: dict[Framework, tuple[str, ...]] = {
    "pytorch": (
        "smdistributed.modelparallel.torch",
        "smdistributed.modelparallel.torch.runtime.preload",
    ),
    "tensorflow": ("smdistributed.modelparallel.tensorflow",),
}


def are_wanted(
    asked: bool | None,
    hosts: Sequence[Host],
    program: Sequence[str],
    environ: Mapping[str, str],
    num_cores: int,
) -> bool:
    """Tells whether the ranks of a job are copies.

    Args:
        asked: what the user says; None where that is nothing.
        hosts: of the job.
        program: a script, or ``-m`` and a module, with arguments.
        environ: of the job.
        num_cores: of this host.

    Raises:
        ConfigError: they are asked for, and cannot be.
    """
    if asked and len(hosts) > 1:
        raise ConfigError(
            f"--fork copies a process of this host; received {len(hosts)} hosts: leave it out."
        )
    if asked is not None:
        return asked
    (host, *others) = hosts
    return (
        not others
        and host.name == LOCAL_HOST
        and (host.slots or 0) > num_cores
        and not usable_gpus(environ)
        # Else each rank is to have an order of its own, and copies have one.
        and environ.get(HASH_VARIABLE) != "random"
        and framework.of_own_import(program) is not None
    )


@contextlib.contextmanager
def of_one_process(
    job: Job, imported: Framework, *, is_asked: bool, say: Callable[[str], None]
) -> Iterator[Job]:
    """Starts a process to copy; yields the job with its address.

    Each attempt of a job has its own: that process may be what was lost.

    Args:
        job: to be started.
        imported: whose library and framework the process imports.
        is_asked: whether it is an error if it cannot; else the job is yielded as it is, and its
            ranks say what is wrong.
        say: is told that it is so, and why.
    """
    exports = {k: text for k, text in job.options.exports.items() if text is not None}
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(
                ForkServer(_IMPORTED[imported], {**job.environ, **exports})
            )
        except SMPError as error:
            if is_asked:
                raise
            reason = str(error).strip().splitlines()[-1]
            say(f"no copies: each process imports the framework itself ({reason})")
            yield job
            return
        yield replace(job, copied_from=server.address)
