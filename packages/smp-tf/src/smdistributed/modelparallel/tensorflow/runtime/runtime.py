"""Starting and ending the library in one process.

``start`` joins the job through the MPI launcher that started the process, or makes a world of one;
then every process starts a TensorFlow server, through which tensors travel in steps.
"""

from __future__ import annotations

import atexit
import os
import secrets
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from smdistributed.modelparallel.common import config as configuration
from smdistributed.modelparallel.common.comm.addresses import free_port, own_address
from smdistributed.modelparallel.common.comm.communicator import Communicator
from smdistributed.modelparallel.common.comm.mpi import MPITransport
from smdistributed.modelparallel.common.comm.transport import (
    FAREWELL_SECONDS,
    SingleProcessTransport,
    Transport,
    started_by_mpi,
)
from smdistributed.modelparallel.common.config.announced import announce
from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.common.failure import FailureHooks, explaining
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.launcher.planned import planned
from smdistributed.modelparallel.common.planning.simulator import Timeline
from smdistributed.modelparallel.common.runtime import Runtime, RuntimeSlot
from smdistributed.modelparallel.common.search.counted_steps import CountedSteps
from smdistributed.modelparallel.common.search.measurement import Wanted
from smdistributed.modelparallel.common.search.recording import Planning
from smdistributed.modelparallel.common.whereabouts import telling
from smdistributed.modelparallel.tensorflow.compat import autograph, processes
from smdistributed.modelparallel.tensorflow.compat.gradients import requests_noted
from smdistributed.modelparallel.tensorflow.compat.variables import checked_access
from smdistributed.modelparallel.tensorflow.execute.links import Links, explained, has_ended
from smdistributed.modelparallel.tensorflow.execute.mailboxes import connected
from smdistributed.modelparallel.tensorflow.parameters.moments import Moments
from smdistributed.modelparallel.tensorflow.parameters.variables import AccessGuard
from smdistributed.modelparallel.tensorflow.runtime.cores import (
    Cores,
    has_one_device,
    have_threads,
)
from smdistributed.modelparallel.tensorflow.runtime.departures import Departures, last_words
from smdistributed.modelparallel.tensorflow.runtime.drawing import draw_alike
from smdistributed.modelparallel.tensorflow.runtime.overdue import Overdue
from smdistributed.modelparallel.tensorflow.runtime.rendezvous import Rendezvous
from smdistributed.modelparallel.tensorflow.runtime.watch import Watch

#: Calls after which nothing can be under way any more that a call has left.
_SURVIVING_CALLS = 1000


@dataclass(kw_only=True)
class TFRuntime(Runtime):
    """The state of the TensorFlow package in this process.

    Attributes:
        links: carry tensors to other processes.
        hooks: what this process does when it fails; None in a world of one.
        guard: of variables that live elsewhere.
        moments: when variables had their values.
        rendezvous: of the processes of this pipeline.
        step_number: a variable that counts the steps, for random numbers.
        unseeded: what random operations without seeds draw from; the same on all processes.
        has_one_core: this process computes on one core, and on no other device.
        calls: see ``processes.surviving_calls``.
        replacements: what ends with the library: functions that stand replaced, and the watch.
        engines: what executes the models of the script.
        current_step: the step function whose graph is being made.
        timeline: plan of the step whose graph was made last.
        is_partitioned: whether some model is.
        post_partition_hooks: to be run after partitioning.
        planning: what is asked of a process that stands for a job; None where the job runs.
        measuring: counts the steps of a job that is measured; None where it is not.
    """

    links: Links
    hooks: FailureHooks | None
    guard: AccessGuard
    moments: Moments
    rendezvous: Rendezvous
    step_number: Any
    unseeded: int
    has_one_core: bool
    calls: deque[Any]
    replacements: ExitStack = field(default_factory=ExitStack)
    engines: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    current_step: Any = None
    timeline: Timeline | None = None
    is_partitioned: bool = False
    post_partition_hooks: list[Callable[[], Any]] = field(default_factory=list)
    planning: Planning | None = None
    measuring: CountedSteps | None = None

    @property
    def pipeline_ranks(self) -> list[int]:
        """Global rank of every partition in this pipeline."""
        return list(self.topology.members(CommGroup.PP_GROUP, self.rank))

    def close(self) -> None:
        """Leaves the job. Collective over WORLD; called at interpreter exit."""
        if self.topology.pp_size > 1:
            self.rendezvous.leave()
        begin = time.monotonic()
        num_steps = int(self.step_number.numpy())
        self.replacements.close()

        def release() -> None:
            # Not all ranks have come here: one may wait for a transfer that will never come.
            is_early = time.monotonic() > begin + FAREWELL_SECONDS
            self._release_data_plane(is_early and self.transport.size > 1)

        self.transport.close(release, last_words(num_steps))
        if self.hooks is not None:
            self.hooks.uninstall()

    def _release_data_plane(self, is_early: bool) -> None:
        """Lets others know that no transfer will come; ends Horovod, which uses MPI until then."""
        if is_early:
            processes.end_collectives(has_ended(self.rank))
        if self.config.horovod:
            import horovod.tensorflow as hvd

            hvd.shutdown()


def start(
    slot: RuntimeSlot[TFRuntime], config: Mapping[str, object] | str | os.PathLike[str] | None
) -> None:
    """Fills ``slot``: reads the configuration, joins the job, starts this process's server.

    Collective: every process.
    """
    if slot.is_filled:
        warnings.warn("smp.init was called again; the second call has no effect.", stacklevel=3)
        return
    settings = configuration.load("tensorflow", config)
    planning = Planning.asked(settings)
    if planning is not None:
        settings = planning.config_alone
    transport: Transport = MPITransport() if started_by_mpi() else SingleProcessTransport()
    replacements = ExitStack()
    calls: deque[Any] = deque(maxlen=_SURVIVING_CALLS)
    hooks = None
    if transport.size > 1:
        hooks = FailureHooks(transport.rank)
        hooks.install()
        replacements.enter_context(
            explaining(lambda error: explained(error, transport.rank, transport.size))
        )
        _come_first()
    announce(settings, transport.rank)
    if planning is not None:
        planning.check_alone(transport.size)
    elif settings.auto:
        settings = planned("tensorflow", settings, transport, _gpu)
    settings.check_world(transport.size, "tensorflow")
    topology = settings.topology(transport.size)
    communicator = Communicator(transport, topology, settings.communication_timeout)
    replacements.enter_context(telling(communicator.activities))
    gpus = _bind_device(transport)
    if settings.horovod:
        _start_horovod(topology.members(CommGroup.DP_GROUP, transport.rank))
    if transport.size > 1:
        have_threads(transport.local_size)
        address = f"{own_address(transport)}:{free_port()}"
        addresses = communicator.allgather(address, CommGroup.WORLD)
        processes.join_cluster(addresses, transport.rank, use_nccl=bool(gpus))
        communicator.barrier(CommGroup.WORLD)
        replacements.enter_context(processes.surviving_calls(calls))
    step_number = tf.Variable(0, dtype=tf.int64, trainable=False)
    pipeline = topology.members(CommGroup.PP_GROUP, transport.rank)
    mailboxes = connected(
        transport.rank,
        pipeline,
        transport.hostname,
        lambda own: communicator.allgather(own, CommGroup.PP_GROUP),
    )
    links = Links(transport.rank, transport.size, bool(gpus), mailboxes)
    if transport.size > 1:
        peers = set(pipeline) - {transport.rank}
        departures = Departures(transport, peers, lambda: int(step_number.numpy()))
        watch = Watch(transport.rank, transport.size, settings.communication_timeout)
        overdue = Overdue(transport.rank, links.waits, watch.latest_seconds)
        watch.start(departures.check, overdue.check)
        replacements.enter_context(telling(overdue.activities))
        replacements.callback(watch.stop)
    autograph.leave_unconverted("smdistributed")
    moments = Moments()
    guard = AccessGuard(topology.pp_size, moments)
    replacements.enter_context(requests_noted())
    replacements.enter_context(
        checked_access(
            guard.is_here, guard.elsewhere, guard.changing, guard.check_saving, guard.restore
        )
    )
    rendezvous = Rendezvous(communicator, pipeline, pipeline.index(transport.rank), moments)
    if len(pipeline) > 1:
        communicator.before_calls(rendezvous.before_call)
        draw_alike(communicator)
    unseeded, cores = secrets.randbits(60), Cores.here(transport.hostname)
    every = [cores]
    if transport.size > 1:
        found = communicator.allgather((unseeded, cores), CommGroup.WORLD)
        unseeded, every = found[0][0], [each for _, each in found]
    has_one_core = cores.number_each(every) == 1 and has_one_device()
    runtime = TFRuntime(
        config=settings,
        topology=topology,
        transport=transport,
        communicator=communicator,
        links=links,
        hooks=hooks,
        guard=guard,
        moments=moments,
        rendezvous=rendezvous,
        step_number=step_number,
        unseeded=unseeded,
        has_one_core=has_one_core,
        calls=calls,
        replacements=replacements,
        planning=planning,
        measuring=_measuring(transport),
    )
    slot.fill(runtime)
    atexit.register(runtime.close)
    if hooks is not None:
        hooks.renew()


def _gpu(transport: Transport) -> tuple[str, int | None] | None:
    """Returns the GPU of this process as its driver names it; None without one."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return None
    own = gpus[transport.local_rank % len(gpus)]
    return str(tf.config.experimental.get_device_details(own).get("device_name", "")), None


def _measuring(transport: Transport) -> CountedSteps | None:
    wanted = Wanted.asked()
    if wanted is None:
        return None
    gpu = _gpu(transport)
    return CountedSteps(wanted, transport.rank, "cpu" if gpu is None else gpu[0])


def _bind_device(transport: Transport) -> list[Any]:
    """Gives this process one GPU of its host, if there are any; returns those."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return []
    if transport.local_size > len(gpus):
        raise UnsupportedError(
            f"every process needs a GPU of its own: {transport.local_size} processes on host "
            f"{transport.hostname}, {len(gpus)} GPUs. Start at most {len(gpus)} processes a host, "
            "or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on the CPU."
        )
    own = gpus[transport.local_rank]
    tf.config.set_visible_devices(own, "GPU")
    tf.config.experimental.set_memory_growth(own, True)
    return [own]


class _TooLateError(SMPError, RuntimeError):
    """The library was started when TensorFlow could no longer be configured."""


def _come_first() -> None:
    """Raises unless TensorFlow has yet to begin."""
    if processes.has_begun():
        raise _TooLateError(
            "smp.init connects the processes before TensorFlow begins, which it did when something "
            "made a tensor or a variable: call smp.init first, also before optimizers, which make "
            "variables as soon as they are made."
        )


def _start_horovod(members: tuple[int, ...]) -> None:
    import horovod.tensorflow as hvd  # its absence is an error of the configuration

    hvd.init(comm=list(members))
