"""Starting and ending the library in one process.

``start`` joins the job through whatever started the process: an MPI launcher (control plane over
MPI), torchrun (control plane over torch.distributed), or nothing (a world of one).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import socket
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.utils.weak import WeakIdKeyDictionary

from smdistributed.modelparallel.common import config as configuration
from smdistributed.modelparallel.common.checkpoint.background import BackgroundSave
from smdistributed.modelparallel.common.comm.addresses import listen_at, own_address
from smdistributed.modelparallel.common.comm.communicator import Communicator
from smdistributed.modelparallel.common.comm.mpi import MPITransport
from smdistributed.modelparallel.common.comm.presence import Presence
from smdistributed.modelparallel.common.comm.transport import (
    FAREWELL_SECONDS,
    SingleProcessTransport,
    Transport,
    started_by_mpi,
    started_by_torchrun,
)
from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.common.config.announced import announce
from smdistributed.modelparallel.common.errors import CommError
from smdistributed.modelparallel.common.failure import FailureHooks, explaining
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.launcher.planned import planned
from smdistributed.modelparallel.common.planning.choosing import Wish
from smdistributed.modelparallel.common.runtime import Runtime, RuntimeSlot
from smdistributed.modelparallel.common.search.counted_steps import CountedSteps
from smdistributed.modelparallel.common.search.measurement import Wanted
from smdistributed.modelparallel.common.search.recording import Planning
from smdistributed.modelparallel.common.topology import Topology
from smdistributed.modelparallel.common.whereabouts import Activity, telling
from smdistributed.modelparallel.torch.building.delayed_parameters import DelayedParameters
from smdistributed.modelparallel.torch.building.manual_partition import ManualPartitions
from smdistributed.modelparallel.torch.collectives.host_numbers import host_numbers
from smdistributed.modelparallel.torch.collectives.interface import Collectives
from smdistributed.modelparallel.torch.collectives.process_group import ProcessGroupCollectives
from smdistributed.modelparallel.torch.collectives.shapes import ShapesOfFakes
from smdistributed.modelparallel.torch.collectives.symmetric_memory import MakeMemory
from smdistributed.modelparallel.torch.compat.private.distributed import default_store
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensorMode
from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup
from smdistributed.modelparallel.torch.execute.links import Links
from smdistributed.modelparallel.torch.execute.peers import Peers
from smdistributed.modelparallel.torch.planning.passes_held import PassesAhead
from smdistributed.modelparallel.torch.random.keys import StepRandom
from smdistributed.modelparallel.torch.runtime.codec import TORCH_CODEC
from smdistributed.modelparallel.torch.runtime.control_plane import TorchTransport
from smdistributed.modelparallel.torch.runtime.departures import Departures
from smdistributed.modelparallel.torch.runtime.joining import meet
from smdistributed.modelparallel.torch.runtime.process_groups import (
    backends,
    new_group,
    serves_host,
)
from smdistributed.modelparallel.torch.runtime.protocols import Model, Optimizer, Step
from smdistributed.modelparallel.torch.runtime.published import Published
from smdistributed.modelparallel.torch.runtime.readable_memory import readable_memory
from smdistributed.modelparallel.torch.runtime.tensor_exchange import build_tensor_group
from smdistributed.modelparallel.torch.sharding.groups import build_groups
from smdistributed.modelparallel.torch.sharding.transport import ShardingGroups
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.marks import TensorMarks

#: CUDA spreads streams over hardware queues. By default each stream of transfers gets one of its
#: own, where it waits nearly all the time; with two that wait, an H100 starts each kernel 1.2 us
#: later. That is 1% of a step. With two queues in all, streams share them. Slices and shards need
#: their exchanges in another queue than computation, as they wait for each other all the time.
_HARDWARE_QUEUES = "2"
#: By how much the queues are longer than by default in which kernels wait for a GPU. Graphs of a
#: pass or two fill them, and a host that cannot launch more is late with the next step: GPT-2 XL
#: over two H200 takes 340 to 397 ms so, and 314 with the longest that there are.
_LAUNCH_QUEUES = "4x"
#: How many operations NCCL's flight recorder keeps: torch walks the stack for each one, a sixth of
#: what an action costs the host. The former name of the variable comes second.
_FLIGHT_RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
#: Tells gloo to connect two ranks when they first exchange something: each with each other one, in
#: each group, is what large jobs would spend their start with.
_CONNECT_WHEN_NEEDED = "TORCH_GLOO_LAZY_INIT"


_Kept = TypeVar("_Kept")


@dataclass(kw_only=True)
class TorchRuntime(Runtime):
    """The state of the PyTorch package in this process.

    Attributes:
        device: where this process computes.
        process_groups: torch's process group of each kind that contains this process; empty in a
            world of one.
        peers: who is blamed when communication fails.
        departures: notices who has left without an exchange.
        hooks: what this process does when it fails; None in a world of one.
        manual_partitions: what the user fixed.
        tensor_marks: which modules the user wants split over tensor-parallel ranks.
        fake_mode: of all fake tensors.
        random: the random numbers of the step in progress.
        tensor_group: the ranks that split modules between them.
        sharding_groups: the ranks that share parameters; None without sharded data parallelism.
        context_group: the ranks that share sequences; None without context parallelism.
        delayed: the parameters that have no values yet.
        current_step: the step in progress.
        replacements: functions of torch that stand replaced while the library runs, and what else
            is put back when it ends.
        models, optimizers: references to those of this process, in order of creation.
        num_models: how many were made.
        pending_save: the checkpoint that may still be being written.
        num_updates: how often optimizers of models have been stepped.
        published: what the ranks of a pipeline leave for each other; None with one partition.
        planning: what is asked of a process that stands for a job; None where the job runs.
        measuring: counts the steps of a job that is measured; None where it is not.
        order: which kind of schedule steps have.
        has_open_order: the script has chosen none, and the first partition will.
        passes: what is known of the memory of those of steps.
        replaced_parameters: those that tensor parallelism has put others in the places of, and
            their names.
    """

    device: torch.device
    process_groups: dict[CommGroup, dist.ProcessGroup]
    peers: Peers
    departures: Departures
    hooks: FailureHooks | None
    manual_partitions: ManualPartitions
    tensor_marks: TensorMarks
    fake_mode: FakeTensorMode
    random: StepRandom
    tensor_group: TensorGroup
    sharding_groups: ShardingGroups | None
    context_group: ContextGroup | None = None
    delayed: DelayedParameters = field(default_factory=DelayedParameters)
    current_step: Step | None = None
    replacements: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    models: list[weakref.ref[Model]] = field(default_factory=list)
    num_models: int = 0
    num_updates: int = 0
    published: Published | None = None
    replaced_parameters: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    optimizers: list[weakref.ref[Optimizer]] = field(default_factory=list)
    pending_save: BackgroundSave | None = None
    planning: Planning | None = None
    measuring: CountedSteps | None = None
    passes: PassesAhead = field(default_factory=PassesAhead)
    order: Wish = field(init=False)
    has_open_order: bool = field(init=False)

    def __post_init__(self) -> None:
        """Takes the order that the script has asked for."""
        self.order = self.config.pipeline
        self.has_open_order = self.device.type == "cuda" and "pipeline" not in self.config.given()

    @property
    def is_in_step(self) -> bool:
        """Whether a step function runs: its Python, or what its modules compute."""
        return self.current_step is not None or self.random.is_active

    def add_model(self, model: Model) -> tuple[int, int]:
        """Takes note of a new DistributedModel.

        Returns:
            a number of its own, and the lowest one that no other model alive has; both the same on
            every process.
        """
        before = len(self.live_models())
        if before:
            gc.collect()  # what is alive must not depend on when a process last looked
        if len(self.live_models()) < before:
            gc.collect()  # what step functions have kept with it
        taken = {each.place_in_keys for each in self.live_models()}
        self.models.append(weakref.ref(model))
        self.num_models += 1
        return self.num_models, min(set(range(1, len(taken) + 2)) - taken)

    def live_models(self) -> list[Model]:
        """Returns the DistributedModels that exist, in order of creation."""
        return _alive(self.models)

    def live_optimizers(self) -> list[Optimizer]:
        """Returns the DistributedOptimizers that exist, in order of creation."""
        return _alive(self.optimizers)

    @property
    def shares_gradients(self) -> bool:
        """Whether of replicas one has a gradient, or each a part of it."""
        has_owners = self.config.shard_optimizer_state and self.topology.dp_cp_size > 1
        return has_owners or self.sharding_groups is not None

    def models_trained_by(self, optimizer: torch.optim.Optimizer) -> list[Model]:
        """Returns the models of which an optimizer holds parameters."""
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        return [
            model
            for model in self.live_models()
            if not held.isdisjoint(map(id, model.parameters()))
        ]

    @cached_property
    def links(self) -> Links:
        """The transfers between the ranks of the pipeline; all step functions share them."""
        return Links(
            self.topology.groups(CommGroup.PP_GROUP),
            self.topology.members(CommGroup.PP_GROUP, self.rank),
            self.coordinates.pp_rank,
            self.process_groups,
            self.device,
            data_plane_timeout(self.config.communication_timeout),
            self.peers,
            self._memory_of_pipeline,
        )

    def activities(self) -> list[Activity]:
        """Returns what the library does in this process at present; for any thread."""
        links: Links | None = vars(self).get("links")  # asking shall not make it
        at = [] if links is None else links.activities()
        return [*at, *self.communicator.activities(), *self.peers.activities()]

    def _memory_of_pipeline(self) -> MakeMemory | None:
        group = self.process_groups[CommGroup.PP_GROUP]
        members = self.topology.members(CommGroup.PP_GROUP, self.rank)
        collectives = ProcessGroupCollectives(
            group, lambda: self.peers.blaming(members, "sharing memory with")
        )
        return readable_memory(
            group,
            collectives,
            self.device,
            self.peers.hosts[self.rank],
            data_plane_timeout(self.config.communication_timeout),
            "ranks of a pipeline send messages",
        )

    def close(self) -> None:
        """Leaves the job. Collective over WORLD; called at interpreter exit."""
        self.replacements.close()
        with contextlib.suppress(CommError):  # of a job that fails its own error is told
            self.communicator.settle(CommGroup.PP_GROUP, FAREWELL_SECONDS)
        self.transport.close(self._release_data_plane, self.departures.stop())
        if self.hooks is not None:
            self.hooks.uninstall()

    def _release_data_plane(self) -> None:
        """Closes torch's connections; peers that still wait for this process learn it so."""
        # Only the end of the last reference to a group closes its connections.
        self.process_groups.clear()
        self.tensor_group = TensorGroup()
        self.sharding_groups = None
        self.context_group = None
        if dist.is_initialized():
            dist.destroy_process_group()


def start(
    slot: RuntimeSlot[TorchRuntime], config: Mapping[str, object] | str | os.PathLike[str] | None
) -> None:
    """Fills ``slot``: reads the configuration, joins the job, builds all groups.

    Collective: every process.
    """
    if slot.is_filled:
        warnings.warn("smp.init was called again; the second call has no effect.", stacklevel=3)
        return
    settings = configuration.load("pytorch", config)
    planning = Planning.asked(settings)
    if planning is not None:
        settings = planning.config_alone
    # Before anything touches the GPU: CUDA reads these once.
    os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", _LAUNCH_QUEUES)
    if settings.tensor_parallel_degree == settings.sharded_data_parallel_degree == 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _HARDWARE_QUEUES)
    if not any(name in os.environ for name in _FLIGHT_RECORDER):
        os.environ[_FLIGHT_RECORDER[0]] = "0"
    os.environ.setdefault(_CONNECT_WHEN_NEEDED, "1")
    timeout_seconds = settings.communication_timeout
    # Before any process group exists: the first fake mode imports functions of torch that keep the
    # world's group as a default argument, and with it the connections that `close` must close.
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    hooks = None
    if started_by_torchrun():
        hooks = _hooks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    transport, peers = _join(timeout_seconds)
    hooks = hooks or _hooks(transport.rank, transport.size)
    announce(settings, transport.rank)
    if planning is not None:
        planning.check_alone(transport.size)
    elif settings.auto:
        settings = planned("pytorch", settings, transport, _gpu)
    settings.check_world(transport.size, "pytorch", transport.local_size)
    topology = settings.topology(transport.size)
    communicator = Communicator(transport, topology, timeout_seconds, TORCH_CODEC)
    device = _bind_device(transport)
    if peers is None:
        peers = Peers(transport.rank, communicator.allgather(Presence.own(), CommGroup.WORLD))
    wanted = Wanted.asked()
    process_groups: dict[CommGroup, dist.ProcessGroup] = {}
    if transport.size > 1:
        with peers.connecting():
            if not dist.is_initialized():
                _join_data_plane(communicator, transport, timeout_seconds)
            process_groups = _process_groups(topology, transport, timeout_seconds)
    tp_rank = topology.coordinates(transport.rank).tp_rank
    # Ranks that bring the same examples draw the same numbers for them.
    num_lanes = 1 if settings.prescaled_batch else topology.tp_size
    random = StepRandom(device, num_lanes, tp_rank if num_lanes > 1 else 0)
    runtime = TorchRuntime(
        config=settings,
        topology=topology,
        transport=transport,
        communicator=communicator,
        device=device,
        process_groups=process_groups,
        peers=peers,
        departures=Departures(transport.rank, transport, peers),
        hooks=hooks,
        fake_mode=fake_mode,
        random=random,
        tensor_group=build_tensor_group(
            settings,
            topology,
            transport.rank,
            peers,
            random,
            device,
            data_plane_timeout(timeout_seconds),
        ),
        sharding_groups=_sharding_groups(settings, topology, transport.rank, peers, device),
        context_group=_context_group(settings, topology, transport.rank, peers),
        tensor_marks=TensorMarks(is_used=topology.tp_size > 1, notes=planning is not None),
        manual_partitions=ManualPartitions(topology.pp_size, is_used=not settings.auto_partition),
        delayed=DelayedParameters(draw=planning is None),
        planning=planning,
        measuring=None if wanted is None else _measuring(wanted, transport.rank, device),
    )
    if topology.pp_size > 1 and transport.size > 1:
        pipeline = topology.members(CommGroup.PP_GROUP, transport.rank)
        runtime.published = Published(
            default_store(), transport.rank, pipeline, timeout_seconds, transport.farewells
        )
        communicator.before_calls(runtime.published.note_call)
    runtime.replacements.enter_context(explaining(peers.explained))
    runtime.replacements.enter_context(telling(runtime.activities))
    slot.fill(runtime)
    if transport.size > 1:
        runtime.departures.start()
    atexit.register(runtime.close)
    if hooks is not None:
        hooks.renew()  # init_process_group has put an exception hook in front of ours


def _gpu(transport: Transport) -> tuple[str, int | None] | None:
    """Returns the GPU of this process as its driver names it, and its bytes; None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(transport.local_rank)
    return properties.name, properties.total_memory


def _measuring(wanted: Wanted, rank: int, device: torch.device) -> CountedSteps:
    if device.type != "cuda":
        return CountedSteps(wanted, rank, "cpu")
    name = torch.cuda.get_device_properties(device).name
    return CountedSteps(wanted, rank, name, partial(torch.cuda.synchronize, device))


def _hooks(rank: int, size: int) -> FailureHooks | None:
    if size == 1:
        return None
    hooks = FailureHooks(rank)
    hooks.install()
    return hooks


def _join(timeout_seconds: float) -> tuple[Transport, Peers | None]:
    """Returns the way to the other processes, and what is known of them already."""
    if started_by_mpi():
        transport = MPITransport()
        _use_loopback(transport.is_one_machine)
        return transport, None
    if not started_by_torchrun():
        return SingleProcessTransport(), None
    if dist.is_initialized():
        return TorchTransport(timeout_seconds), None
    _use_loopback(os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"])
    timeout = data_plane_timeout(timeout_seconds)
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    # torchrun's agent keeps one store for all attempts, with what those before have left there.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", store)  # type: ignore[attr-defined]
    peers = Peers(rank, meet(store, rank, size, timeout_seconds))
    with peers.connecting():
        dist.init_process_group(
            backends(), store=store, rank=rank, world_size=size, timeout=timeout
        )
        return TorchTransport(timeout_seconds, store), peers


def _use_loopback(is_one_host: bool) -> None:
    """Lets gloo of a job on one host listen where no other host can reach it."""
    if is_one_host and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def data_plane_timeout(timeout_seconds: float) -> timedelta:
    """Returns how long torch's own transfers wait.

    On GPUs a hang shows on the host first, in the next call of the control plane, which can name
    the missing rank; NCCL's watchdog cannot, so it comes after.
    """
    grace_seconds = 5.0 if torch.cuda.is_available() else 0.0
    return timedelta(seconds=timeout_seconds + grace_seconds)


def _bind_device(transport: Transport) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if transport.local_size > count:
        raise CommError(
            f"every process needs a GPU of its own: {transport.local_size} processes on host "
            f"{transport.hostname}, {count} GPUs. Start at most {count} processes a host, or hide "
            "the GPUs with CUDA_VISIBLE_DEVICES= to run on the CPU.",
            rank=transport.rank,
        )
    device = torch.device("cuda", transport.local_rank)
    torch.cuda.set_device(device)
    return device


def _join_data_plane(
    communicator: Communicator, transport: Transport, timeout_seconds: float
) -> None:
    """Initialises torch.distributed at an address that rank 0 finds and hands out.

    torch's store answers whoever asks, so it listens on the one interface that the job needs.
    """
    timeout = data_plane_timeout(timeout_seconds)
    address, descriptor = None, None
    if transport.rank == 0:
        host = os.environ.get("MASTER_ADDR") or own_address(transport)
        listener = listen_at(host, int(os.environ.get("MASTER_PORT", 0)))
        address, descriptor = (host, listener.getsockname()[1]), listener.detach()
    host, port = communicator.allgather(address, CommGroup.WORLD)[0]
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=transport.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )
    dist.init_process_group(
        backends(),
        store=store,
        rank=transport.rank,
        world_size=transport.size,
        timeout=timeout,
    )


def _process_groups(
    topology: Topology, transport: Transport, timeout_seconds: float
) -> dict[CommGroup, dist.ProcessGroup]:
    """Builds torch's groups of every kind, in one order on all ranks, and keeps the own ones."""
    timeout = data_plane_timeout(timeout_seconds)
    own: dict[CommGroup, dist.ProcessGroup] = {}
    world = dist.group.WORLD
    assert world is not None
    built = {tuple(range(transport.size)): world} if serves_host(world) else {}
    for kind in CommGroup:
        for members in topology.groups(kind):
            if members not in built:
                built[members] = new_group(members, timeout)
            if transport.rank in members:
                own[kind] = built[members]
    return own


def _sharding_groups(
    settings: Config, topology: Topology, rank: int, peers: Peers, device: torch.device
) -> ShardingGroups | None:
    """Returns the groups of sharded data parallelism. Collective: WORLD."""
    degree = settings.sharded_data_parallel_degree
    if degree == 1:
        return None
    timeout = data_plane_timeout(settings.communication_timeout)

    def readable(group: dist.ProcessGroup, collectives: Collectives) -> MakeMemory | None:
        what = "ranks of a sharding group get parameters"
        return readable_memory(group, collectives, device, peers.hosts[rank], timeout, what)

    with peers.connecting():
        groups = build_groups(
            topology,
            degree,
            rank,
            lambda members: new_group(members, timeout),
            peers.blaming,
            peers.hosts if settings.sdp_hierarchical_allgather else None,
            readable,
        )
    groups.collectives.numbers = host_numbers(
        groups.collectives,
        peers.hosts[rank],
        lambda: peers.are_there(groups.members),
        timeout.total_seconds(),
    )
    return groups


def _context_group(
    settings: Config, topology: Topology, rank: int, peers: Peers
) -> ContextGroup | None:
    """Returns the ranks that share sequences. Collective: WORLD."""
    if topology.cp_size == 1:
        return None
    timeout = data_plane_timeout(settings.communication_timeout)
    with peers.connecting():
        # Of their own, as ranks do not agree on their order and that of reductions of gradients.
        groups = {
            members: new_group(members, timeout) for members in topology.groups(CommGroup.CP_GROUP)
        }
    members = topology.members(CommGroup.CP_GROUP, rank)
    return ContextGroup(
        ShapesOfFakes(
            ProcessGroupCollectives(
                groups[members], lambda: peers.blaming(members, "sharing a sequence with")
            )
        )
    )


def _alive(references: list[weakref.ref[_Kept]]) -> list[_Kept]:
    found = [(reference, reference()) for reference in references]
    references[:] = [reference for reference, kept in found if kept is not None]
    return [kept for _, kept in found if kept is not None]
