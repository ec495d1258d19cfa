"""What of a model this rank holds: the whole of it until it is partitioned, then its own part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import (
    NotPartitionedError,
    PartitionError,
    SMPError,
)
from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.common.pieces import Piece, Rectangle
from smdistributed.modelparallel.torch.absence.digests import hash_of
from smdistributed.modelparallel.torch.absence.notes import REMEDY, Origin
from smdistributed.modelparallel.torch.absence.owned import Owned, own_up
from smdistributed.modelparallel.torch.absence.tensors import (
    AbsentTensor,
    Place,
    is_model_type,
    is_vacant,
    make_absent,
    make_present,
    make_view_absent,
    note_gradient,
    renew,
)
from smdistributed.modelparallel.torch.compat.private.tensors import users_of_memory
from smdistributed.modelparallel.torch.model.absence import Absence
from smdistributed.modelparallel.torch.model.keeper import ModelsKeeper
from smdistributed.modelparallel.torch.model.ownership import Ownership
from smdistributed.modelparallel.torch.planning.placement import Placement
from smdistributed.modelparallel.torch.record.fakes import FakeModel, Slot
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.sharding.layout import block, is_cut
from smdistributed.modelparallel.torch.sharding.parameter import ShardedParameter, as_blocks
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule, Slice

NOT_PARTITIONED = (
    "the model is not partitioned yet: that happens in the first call of a step function."
)


class Holder:
    """The tensors of one model on this rank.

    With one partition the rank holds the whole model from the start. With more, the first call of
    a step function decides the partition; the rank then keeps its part on the device, and the
    tensors of other ranks stay in the modules, empty.

    Args:
        runtime: the state of the library in this process.
        module: the user's model.
        number: of the model in the keys of random numbers.

    Attributes:
        fakes: the names of the model's modules and tensors, and their stand-ins.
        absence: refuses what needs the tensors of other ranks.
        version: how often the structure of the user's model was taken, or other hooks were found.
    """

    def __init__(self, runtime: TorchRuntime, module: nn.Module, number: int) -> None:
        self._runtime = runtime
        self._own = runtime.coordinates.pp_rank
        # A model that is planned for is never placed: it may be too large for this machine.
        self._is_whole = runtime.topology.pp_size == 1 and runtime.planning is None
        self._placement: Placement | None = None
        self._views: list[tuple[Slot, torch.Tensor, Place]] = []
        self._waiting: list[Callable[[], Any]] = []
        self._fixed: dict[str, int] = {}
        self._is_gathered = False
        self._sharded: frozenset[Slot] = frozenset()
        #: What is in shards, by id: a script may put it elsewhere in the model.
        self._cut_tensors: dict[int, torch.Tensor] = {}
        self.absence = Absence(runtime)
        self._keeper = ModelsKeeper(runtime)
        self.ownership = Ownership(self._keeper, _tensor_now)
        self._number = number
        self.fakes = FakeModel(module, runtime.fake_mode, runtime.device, number=number)
        self.version = 0
        #: With one partition, which modules are recorded whole, if steps are recorded.

    # ------------------------------------------------------------------ the partition

    @property
    def partitioned(self) -> bool:
        """Whether the partition is decided, by the first step call; with one partition, at once."""
        return self._placement is not None or self._is_whole

    @property
    def placement(self) -> Placement:
        """Where every module is.

        Raises:
            NotPartitionedError: that is not decided.
        """
        if self._placement is None:
            raise NotPartitionedError(NOT_PARTITIONED)
        return self._placement

    @property
    def is_split(self) -> bool:
        """Whether other ranks hold parts of the model that are not here."""
        return self._placement is not None or self.has_slices or bool(self._sharded)

    @property
    def is_partial(self) -> bool:
        """Whether modules of the model are on other ranks."""
        return self._placement is not None

    def partition_of(self, module: nn.Module) -> int | None:
        """Returns the partition of a module of the user's model; None while it is not decided."""
        return None if self._placement is None else self._placement.partition_of[module]

    def fix_partition(self, partition: Mapping[str, int]) -> None:
        """Decides the partition of modules by name, as a checkpoint has it.

        Raises:
            SMPError: the model is partitioned already, otherwise.
        """
        if self._placement is not None and partition != self.partition_by_name():
            raise SMPError(
                "the checkpoint has another partition than the model, which is partitioned "
                "already: resume before the first call of a step function."
            )
        self._fixed = dict(partition)

    @property
    def fixed_partition(self) -> dict[nn.Module, int]:
        """The modules whose partition a checkpoint decides."""
        return {
            module: self._fixed[name]
            for module, name in self.fakes.names.items()
            if name in self._fixed
        }

    def partition_by_name(self) -> dict[str, int]:
        """Returns the partition of every module of the chosen granularity, by name."""
        if self._placement is None:
            return {}
        assignment = self._placement.assignment
        return {**assignment.containers, **assignment.units}

    # ------------------------------------------------------------------ what waits for it

    def when_partitioned(self, action: Callable[[], Any]) -> None:
        """Runs ``action`` now if the model is partitioned, else right after that."""
        if self.partitioned:
            action()
        else:
            self._waiting.append(action)

    def check_nothing_waits(self) -> None:
        """Raises if a loaded state is not in the model yet, since it waits for the partition.

        Raises:
            NotPartitionedError: one is waiting.
        """
        if self._waiting:
            raise NotPartitionedError(
                "a state that was loaded waits for the partition of the model, which the first "
                "call of a step function decides; read the state after that call."
            )

    def run_waiting(self) -> None:
        """Runs what waited for the partition."""
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()

    # ------------------------------------------------------------------ tensors

    def place_whole(self) -> None:
        """Brings the whole model to the device."""
        for _, tensor in self.delayed():
            self._runtime.delayed.fill(tensor, self._runtime.device)
        self.fakes.model.to(self._runtime.device)

    def note_views(self) -> None:
        """Takes note of what a script has that sees tensors which may go to other ranks.

        Not of what modules keep (a weight that was normed, say): they run where their tensors are.
        Nor of what sees tensors on another device, which is left behind when a model is moved.
        """
        kept = _within([vars(module) for module in self.fakes.names])
        self._views = [
            (slot, each, place)
            for slot in self.fakes.slots
            for each, place in self._views_of(_tensor(slot))
            if id(each) not in kept
        ]

    def _views_of(self, tensor: torch.Tensor) -> list[tuple[torch.Tensor, Place]]:
        """Returns what else sees the memory of a tensor of the model, and where in it."""
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
        if not is_plain or tensor.device != self._runtime.device or users_of_memory(tensor) == 1:
            return []
        begin = tensor.storage_offset()
        return [
            (each, (each.shape, each.stride(), int(each.storage_offset() - begin)))
            for each in self._keeper.sharing_memory(tensor) or ()
            if type(each) in (torch.Tensor, nn.Parameter) and each.dtype is tensor.dtype
        ]

    def place(self, placement: Placement) -> None:
        """Keeps the tensors of the own partition, on the device, and frees the others'."""
        self._placement = placement
        self._settle()
        for slot, view, place in self._views:
            if not self.holds(slot):
                make_view_absent(view, _tensor(slot), place)
            elif not placement.is_everywhere(slot) and slice_at(slot) is None:
                origin = self._origin(slot).at(str(place))
                own_up(view, Owned(self._keeper, origin, is_own=True))
        self._views.clear()

    def refresh(self) -> bool:
        """Takes the user's changes to the structure of the model: modules, parameters, ties.

        Returns:
            whether there were any.

        Raises:
            PartitionError: a parameter is now shared between partitions, or was given what another
                partition has.
        """
        if self._is_gathered:
            self._settle()  # what was gathered for use outside of steps goes again
        self.ownership.begin_step(None if self.fakes.is_current else self.fakes.model)
        if self._placement is not None:
            self.check_values()
        if self.fakes.is_current:
            if not self._is_whole and self.fakes.hooks.follow(self.fakes.named_parameters):
                self.version += 1
            return False
        runtime, former = self._runtime, self.fakes
        self.fakes = FakeModel(former.model, runtime.fake_mode, runtime.device, former)
        self._sharded = frozenset(
            slot for slot in self.fakes.slots if id(_tensor(slot)) in self._cut_tensors
        )
        self.version += 1
        if self._placement is not None:
            self._placement = self._placement.after_changes(self.fakes)
            self._placement.check_ties()
            self._settle()
        return True

    def end_step(self) -> None:
        """Takes note of the hooks that modules have put on their own parameters, on this rank."""
        if not self._is_whole:
            self.fakes.hooks.leave_out(self.fakes.named_parameters)

    def _settle(self) -> None:
        device, delayed = self._runtime.device, self._runtime.delayed
        for slot, tensor in self.delayed():
            if self.holds(slot):
                delayed.fill(tensor, device)
            else:
                delayed.drop(tensor, device)
        for slot in self.fakes.slots:
            tensor = _tensor(slot)
            if isinstance(tensor, ShardedParameter):
                continue
            if not self.holds(slot):
                self._let_go(slot, tensor)
            elif isinstance(tensor, AbsentTensor):
                raise PartitionError(
                    f"{self.fakes.slot_name(slot)} belongs on partition {self._own}, and was made "
                    f"between two steps from what another partition has: {tensor!r}. Make it from "
                    "numbers that every rank has, or before the first call of a step function."
                )
            else:
                tensor.data = tensor.data.to(device)
        self._is_gathered = False
        self.ownership.of(
            {
                slot: self._origin(slot)
                for slot in self.fakes.slots
                if not self.placement.is_everywhere(slot)
                and self.placement.owner_of(slot) == self._own
            }
        )
        lacking = {
            module: name
            for module, name in self.fakes.names.items()
            if any(not self.holds(slot) for slot in self._slots_in(module))
        }
        emptied = {
            module
            for module in lacking
            if not all(
                self.holds(slot) or isinstance(_tensor(slot), AbsentTensor)
                for slot in self._slots_in(module)
            )
        }
        self.absence.begin(self.fakes.model, lacking, emptied)

    def check_values(self) -> None:
        """Raises if a parameter has been given what only another partition knows.

        Raises:
            PartitionError: one has.
            UnsupportedError: what one was given as its data was written to afterwards.
        """
        self._keeper.given.check()
        for name, tensor in self.named_parameters():
            if is_vacant(tensor):
                raise PartitionError(
                    f"{name} was given the data of what another partition has, or of what was "
                    f"computed from it: copy_() says so where it happens. {REMEDY}"
                )

    def _let_go(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Frees a tensor of another rank."""
        device = self._runtime.device
        if is_model_type(tensor):
            # Between steps slices stand for the whole, where they are and where they are not.
            shape = torch.Size(self.fakes.whole_shapes.get(slot, self.fakes.slots[slot].shape))
            make_absent(tensor, self._keeper, self._origin(slot), shape, device)
        else:
            # Meta data cannot be assigned to a parameter that lives on a device.
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=device)

    def _origin(self, slot: Slot) -> Origin:
        # One name for a tied one, wherever it is come to.
        name = self.fakes.slot_name(self.fakes.first_slot(slot))
        owner = self.placement.owner_of(slot)
        digest = hash_of(str(self._number), name)
        return Origin(frozenset({name}), frozenset({owner}), digest)

    def note_gradients(self, names: Collection[str]) -> None:
        """Lets parameters of other ranks have the gradients that they have there."""
        for slot in self.fakes.slots:
            tensor = _tensor(slot)
            if isinstance(tensor, AbsentTensor):
                renew(tensor, self._origin(slot))
                if self.fakes.slot_name(slot) in names:
                    note_gradient(tensor)

    # ------------------------------------------------------------------ shards

    def choose_sharded(self) -> None:
        """Decides which parameters are cut into shards; every rank finds the same.

        Parameters that have no other copy, that every rank needs, or whose modules read and write
        their state in a way of their own stay whole.
        """
        config, degree = self._runtime.config, self._degree
        if degree == 1:
            return
        self._sharded = frozenset(
            slot
            for slot, fake in self.fakes.slots.items()
            if slot[1] in slot[0]._parameters
            and is_model_type(_tensor(slot))
            and is_cut(tuple(fake.shape), fake.dtype, config.sdp_param_persistence_threshold)
            and not (self._placement is not None and self._placement.is_everywhere(slot))
            and not loads_by_itself(slot[0])
        )
        tied = {id(_tensor(slot)) for slot in self.fakes.slots if slot not in self._sharded}
        # Of a tied parameter all places must agree.
        self._sharded = frozenset(slot for slot in self._sharded if id(_tensor(slot)) not in tied)
        self._cut_tensors = {id(each): each for each in map(_tensor, self._sharded)}

    @property
    def _degree(self) -> int:
        return self._runtime.config.sharded_data_parallel_degree

    @contextlib.contextmanager
    def as_blocks(self) -> Iterator[None]:
        """Inside, what reads or writes sharded parameters gets the blocks of this rank."""
        homes = {id(each.shard.home): each.shard.home for _, each in self._cut()}
        with as_blocks(homes.values()):
            yield

    def _cut(self) -> Iterator[tuple[str, ShardedParameter]]:
        for name, each in self.named_sharded():
            if isinstance(each, ShardedParameter):
                yield name, each

    @property
    def has_shards(self) -> bool:
        """Whether parameters of the model are in shards."""
        return bool(self._sharded)

    def named_sharded(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields name and parameter of what is in shards, and on this rank."""
        seen: set[int] = set()
        for slot in self.fakes.slots:
            tensor = _tensor(slot)
            if slot in self._sharded and self.holds(slot) and id(tensor) not in seen:
                seen.add(id(tensor))
                yield self.fakes.slot_name(slot), tensor

    def gather(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes the tensors of other ranks, by name, until the next step."""
        for slot in self.fakes.slots:
            name = self.fakes.slot_name(slot)
            if not self.holds(slot):
                make_present(_tensor(slot), tensors[name])
        self._is_gathered = True
        self.ownership.wake()
        self.ownership.of({})
        self.absence.end()

    def _slots_in(self, module: nn.Module) -> Iterator[Slot]:
        for each in module.modules():
            for tensors in (each._parameters, each._buffers):
                yield from ((each, name) for name in tensors if (each, name) in self.fakes.slots)

    def delayed(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        """Yields what has no values yet: a tied tensor once."""
        for slot in self.fakes.slots:
            tensor = _tensor(slot)
            if self._runtime.delayed.holds(tensor):
                yield slot, tensor

    def pieces_of(self, slot: Slot) -> list[Piece]:
        """Returns which parts of a parameter or buffer which ranks hold.

        Of what this rank does not hold, too: every rank can say where everything is. A part can be
        empty, where there are more ranks than rows.

        Raises:
            NotPartitionedError: the partition is not decided.
        """
        return self._pieces_of(slot, self._owner_of(slot))

    def _pieces_of(self, slot: Slot, owner: int) -> list[Piece]:
        topology, shape = self._runtime.topology, tuple(self.fakes.slots[slot].shape)
        name = self.fakes.slot_name(slot)
        if self._placement is not None and self._placement.is_everywhere(slot):
            ranks = topology.members(CommGroup.WORLD, 0)
            return [Piece(name, shape, Rectangle.whole(shape), ranks)]
        sliced = slice_at(slot)
        if sliced is None:
            ranks = topology.members(CommGroup.DP_CP_GROUP, topology.rank_of(owner, 0, 0))
            parts = [Piece(name, shape, Rectangle.whole(shape), ranks)]
        else:
            parts = [
                Piece(
                    name,
                    sliced.shape,
                    sliced.part(topology.tp_size, tp_rank),
                    topology.members(CommGroup.RDP_CP_GROUP, topology.rank_of(owner, tp_rank, 0)),
                )
                for tp_rank in range(topology.tp_size)
            ]
        if slot not in self._sharded:
            return parts
        return [shard for part in parts for shard in self._shards_of(part)]

    def _shards_of(self, piece: Piece) -> Iterator[Piece]:
        topology, degree = self._runtime.topology, self._degree
        for index in range(degree):
            ranks = tuple(
                rank
                for rank in piece.ranks
                if topology.coordinates(rank).rdp_cp_rank % degree == index
            )
            inner = block(piece.part.sizes, degree, index)
            yield Piece(piece.name, piece.shape, piece.part.inner(inner), ranks)

    def _owner_of(self, slot: Slot) -> int:
        return 0 if self._is_whole else self.placement.owner_of(slot)

    def piece(self, slot: Slot) -> Piece:
        """Returns the part that a rank with the own other coordinates holds."""
        owner = self._owner_of(slot)
        return self._own_of(self._pieces_of(slot, owner), owner)

    def _own_of(self, pieces: list[Piece], owner: int) -> Piece:
        if len(pieces) == 1:
            return pieces[0]
        place = self._runtime.coordinates
        rank = self._runtime.topology.rank_of(owner, place.tp_rank, place.rdp_rank, place.cp_rank)
        return next(piece for piece in pieces if rank in piece.ranks)

    def in_pieces(self) -> Iterator[tuple[str, list[Piece], Piece]]:
        """Yields name, pieces and own piece of what is in several, also before the partition.

        As long as that is not decided, they are those of the own partition. A tensor of a module
        with several names comes with each of them, as a state has it.
        """
        prefixes: dict[nn.Module, list[str]] = {}
        for prefix, module in self.fakes.model.named_modules(remove_duplicate=False):
            prefixes.setdefault(module, []).append(f"{prefix}." if prefix else "")
        for slot in self.fakes.slots:
            owner = self._owner_of(slot) if self.partitioned else self._own
            pieces = self._pieces_of(slot, owner)
            if len(pieces) > 1:
                module, attribute = slot
                for prefix in prefixes[module]:
                    yield f"{prefix}{attribute}", pieces, self._own_of(pieces, owner)

    def pieces(self) -> dict[str, list[Piece]]:
        """Returns the pieces of every parameter and buffer, by name."""
        return {self.fakes.slot_name(slot): self.pieces_of(slot) for slot in self.fakes.slots}

    def sliced_names(self) -> set[str]:
        """Returns the names of what is split over the tensor-parallel ranks."""
        return {
            self.fakes.slot_name(slot) for slot in self.fakes.slots if slice_at(slot) is not None
        }

    def is_sliced(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor of the model is split over the tensor-parallel ranks."""
        return any(
            slice_at(slot) is not None and _tensor(slot) is tensor for slot in self.fakes.slots
        )

    @property
    def has_slices(self) -> bool:
        """Whether tensors of the model are split over the tensor-parallel ranks."""
        return bool(self.sliced_names())

    def saved_names(self) -> list[str]:
        """Returns the names that the model's state has."""
        with self.absence.past(), self.as_blocks():
            return list(self.fakes.model.state_dict())

    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the whole tensors that the model's state has, by name."""
        saved = set(self.saved_names())
        return {
            name: tuple(fake.shape) if (sliced := slice_at(slot)) is None else sliced.shape
            for slot, fake in self.fakes.slots.items()
            if (name := self.fakes.slot_name(slot)) in saved
        }

    def holds(self, slot: Slot) -> bool:
        """Tells whether some of a parameter or buffer is on this rank.

        Asked of every slot in every step: slices and shards only deal out what a partition has.
        """
        if self._is_whole:
            return True
        placement = self.placement
        return placement.is_everywhere(slot) or placement.owner_of(slot) == self._own

    def holds_module(self, module: nn.Module) -> bool:
        """Tells whether a module, or what it holds itself if it is split, is on this rank."""
        return self._is_whole or self.placement.partition_of.get(module) == self._own

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields name and parameter of what is on this rank; names of the whole model."""
        return self._named("_parameters")

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields name and buffer of what is on this rank."""
        return self._named("_buffers")

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yields the buffers on this rank."""
        return (tensor for _, tensor in self.named_buffers())

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields name and module of the modules on this rank."""
        for module, name in self.fakes.names.items():
            if self.holds_module(module):
                yield name, module

    def _named(self, kind: Literal["_parameters", "_buffers"]) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for slot in self.fakes.slots:
            module, name = slot
            tensor = getattr(module, kind).get(name)
            if tensor is not None and id(tensor) not in seen and self.holds(slot):
                seen.add(id(tensor))
                yield self.fakes.slot_name(slot), tensor


def slice_at(slot: Slot) -> Slice | None:
    """Returns which slice of a whole tensor a parameter is; None if it is whole."""
    module, name = slot
    return module.slice_of(name) if isinstance(module, DistributedModule) else None


def loads_by_itself(module: nn.Module) -> bool:
    """Tells whether a module reads states in a way of its own, so that other shapes may fit."""
    loads = type(module)._load_from_state_dict
    is_torchs = (loads.__module__ or "").startswith("torch.")
    return bool(module._load_state_dict_pre_hooks) or not is_torchs


def _within(found: list[Any]) -> set[int]:
    """Returns the ids of what lies in dicts and lists, which may hold each other."""
    seen: set[int] = set()
    while found:
        each = found.pop()
        if id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, dict):
                found += each.values()
            elif isinstance(each, list | tuple):
                found += each
    return seen


def _tensor_now(slot: Slot) -> torch.Tensor | None:
    """Returns the tensor at a place of a model, which a script may have changed since."""
    module, name = slot
    return module._parameters.get(name, module._buffers.get(name))


def _tensor(slot: Slot) -> Any:
    module, name = slot
    tensors: Any = module._parameters if name in module._parameters else module._buffers
    return tensors[name]
