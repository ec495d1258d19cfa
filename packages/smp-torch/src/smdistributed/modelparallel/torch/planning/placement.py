"""Which partition of a model a module belongs to.

The decision is made once, from the costs that a profile measured and the partitions that the user
fixed, by the shared partitioner; the same on every rank, since all compute it from the same data.

Source: model-parallel-core-features.md, Automated Model Splitting with PyTorch.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import PartitionError
from smdistributed.modelparallel.common.planning.cost_tree import STATE_FACTOR
from smdistributed.modelparallel.common.planning.partitioner import (
    Assignment,
    Unit,
    partition,
)
from smdistributed.modelparallel.torch.planning.compute_costs import ComputeCosts
from smdistributed.modelparallel.torch.record.costs.meter import ModuleProfile, Profile
from smdistributed.modelparallel.torch.record.fakes import FakeModel, Slot
from smdistributed.modelparallel.torch.record.ir import Leaf
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule


@dataclass(frozen=True)
class Placement:
    """Where every module of one model is.

    Attributes:
        fakes: the model, with its module names.
        assignment: the partitioner's decision.
    """

    fakes: FakeModel
    assignment: Assignment

    @cached_property
    def leaves(self) -> dict[nn.Module, Leaf]:
        """The modules that sit whole on one partition.

        Those inside others too: a ``ModuleList`` is never called itself, only what it holds.
        """
        split = self.assignment.containers
        return {
            module: Leaf(name, self.partition_of[module])
            for module, name in self.fakes.names.items()
            if name not in split
        }

    @cached_property
    def partition_of(self) -> dict[nn.Module, int]:
        """Partition of every module; of a split one, that of what it holds itself.

        A module that the partitioner did not see by itself goes with the nearest one above it.
        """
        known = {**self.assignment.units, **self.assignment.containers}
        found: dict[nn.Module, int] = {}
        for module, name in self.fakes.names.items():
            while name not in known:
                name = name.rpartition(".")[0]
            found[module] = known[name]
        return found

    def after_changes(self, fakes: FakeModel) -> Placement:
        """Returns where everything is after the user has changed the model.

        A module stays where it is under whatever name; a new one takes the place of the one whose
        name it has.
        """
        placed = {unit.name: unit for unit in self.assignment.placed}
        former = self.fakes.names
        units = [
            dataclasses.replace(placed[former.get(module, name)], name=name)
            for module, name in fakes.names.items()
            if former.get(module, name) in placed
        ]
        names = {unit.name for unit in units}
        gone = [unit for name, unit in placed.items() if name not in names]
        assignment = dataclasses.replace(self.assignment, placed=(*units, *gone))
        return Placement(fakes, assignment)

    def check_ties(self) -> None:
        """Makes sure that no parameter is shared by modules of several partitions.

        Raises:
            PartitionError: one is; the partitioner never decides so, a later change of the model
                can.
        """
        holders: dict[int, Slot] = {}
        for slot, fake in self.fakes.slots.items():
            first = holders.setdefault(id(fake), slot)
            if isinstance(fake, nn.Parameter) and (
                self.partition_of[slot[0]] != self.partition_of[first[0]]
            ):
                raise PartitionError(
                    f"the parameters {self.fakes.slot_name(first)} and "
                    f"{self.fakes.slot_name(slot)} were made one after the model was partitioned, "
                    f"but live on partitions {self.partition_of[first[0]]} and "
                    f"{self.partition_of[slot[0]]}. Tie them before the first call of a step "
                    "function."
                )

    @cached_property
    def _owners(self) -> dict[int, int]:
        # Tied slots share one fake; the partitioner keeps their modules together.
        owners: dict[int, int] = {}
        for (module, _), fake in self.fakes.slots.items():
            owners.setdefault(id(fake), self.partition_of[module])
        return owners

    def partition_of_name(self, name: str) -> int:
        """Returns the partition of the module that has a parameter or buffer, by its name."""
        owner = self.fakes.model.get_submodule(name.rpartition(".")[0])
        return self.partition_of[owner]

    def owner_of(self, slot: Slot) -> int:
        """Returns the partition that holds a parameter or buffer."""
        return self._owners[id(self.fakes.slots[slot])]

    @cached_property
    def _copied(self) -> dict[int, list[Slot]]:
        # By fakes: what one place has, tied ones have.
        places: dict[int, list[Slot]] = {}
        for (module, name), fake in self.fakes.slots.items():
            if name in module._buffers:
                places.setdefault(id(fake), []).append((module, name))
        return {
            fake: slots
            for fake, slots in places.items()
            if any(map(self._is_of_split, slots))
            or len({self.partition_of[module] for module, _ in slots}) > 1
        }

    def _is_of_split(self, slot: Slot) -> bool:
        return self.fakes.names[slot[0]] in self.assignment.containers

    def is_everywhere(self, slot: Slot) -> bool:
        """Tells whether every rank keeps a copy.

        Of buffers of split modules, which glue may read, and of those that modules of several
        partitions share.
        """
        return id(self.fakes.slots[slot]) in self._copied

    def is_shared(self, slot: Slot) -> bool:
        """Tells whether every rank has a copy of a buffer of a module that stays whole."""
        slots = self._copied.get(id(self.fakes.slots[slot]), [])
        return not all(map(self._is_of_split, slots))


def decide(
    fakes: FakeModel,
    profile: Profile | None,
    pinned: Mapping[nn.Module, int],
    num_partitions: int,
    memory_weight: float,
    costs: ComputeCosts,
    *,
    v_shaped: bool = False,
    num_microbatches: int | None = None,
) -> Placement:
    """Assigns the modules of a model to partitions.

    Args:
        fakes: the model.
        profile: measured costs; None takes parameter sizes only.
        pinned: modules whose partition the user fixed.
        num_partitions: how many there are.
        memory_weight: share of memory balance in the objective, 0 to 1.
        costs: what work costs.
        v_shaped: whether the partitions go up the model and come back.
        num_microbatches: of a mini-batch, for a V.

    Raises:
        PartitionError: the fixed partitions contradict shared parameters; the model has too few
            parts for a V.
    """
    assignment = partition(
        cost_tree(fakes, profile, pinned, costs),
        num_partitions,
        memory_weight,
        v_shaped=v_shaped,
        num_microbatches=num_microbatches,
    )
    return Placement(fakes, assignment)


def cost_tree(
    fakes: FakeModel,
    profile: Profile | None,
    pinned: Mapping[nn.Module, int],
    costs: ComputeCosts,
) -> Unit:
    """Returns what the partitioner is given of a model; see ``decide``."""
    return _unit(_Tree(fakes, profile, pinned, costs), fakes.model, 0)


class _Tree:
    """What building the cost tree needs to know."""

    def __init__(
        self,
        fakes: FakeModel,
        profile: Profile | None,
        pinned: Mapping[nn.Module, int],
        costs: ComputeCosts,
    ) -> None:
        self._costs = costs
        self.fakes = fakes
        self.profile = profile
        self.pinned = pinned
        self.placed: set[nn.Module] = set()
        self.counted: set[int] = set()
        holders: dict[int, list[Slot]] = {}
        for slot, fake in fakes.slots.items():
            if isinstance(fake, nn.Parameter):
                holders.setdefault(id(fake), []).append(slot)
        # A tied parameter goes by the name of its first slot.
        self.shared = {
            slot: fakes.slot_name(slots[0])
            for slots in holders.values()
            if len({module for module, _ in slots}) > 1
            for slot in slots
        }
        #: What modules use past the tree goes where they go, unless the user says where.
        self.reached = {} if pinned or profile is None else profile.reached
        self.shared |= {
            slot: self.shared.get(slot, fakes.slot_name(slot))
            for slot in set[Slot]().union(*self.reached.values())
            if slot in fakes.slots
        }
        parents = Counter(child for each in fakes.model.modules() for child in each.children())
        #: What is inside a module with several parents, and has parameters or buffers itself.
        self.of_several = {
            inner: fakes.names[inner]
            for module, number in parents.items()
            if number > 1
            for inner in module.modules()
            if any(True for _ in _own_tensors(inner))
        }

    def costs(self, module: nn.Module) -> ModuleProfile | None:
        return self.profile.modules.get(module) if self.profile else None

    def compute(self, *costs: ModuleProfile) -> float:
        return sum(self._costs.of(each.work).both for each in costs)

    def saved(self, moved: int) -> float:
        return self._costs.saved(moved).both

    def crossing_behind(self, module: nn.Module) -> int:
        """Returns the bytes that cross a cut behind a module and all that is called within it."""
        if self.profile is None:
            return 0
        called = [self.profile.modules[each].order for each in module.modules() if self.costs(each)]
        # What comes before the first module crosses a cut behind those that are not called.
        return self.profile.crossing[max(called, default=-1) + 1]

    def own_parameter_bytes(self, module: nn.Module) -> int:
        total = 0
        for name in module._parameters:
            fake = self.fakes.slots.get((module, name))
            if fake is not None and id(fake) not in self.counted:
                self.counted.add(id(fake))
                total += fake.numel() * fake.element_size()
        return total


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _stand_in(tree: _Tree, module: nn.Module, name: str, order: int) -> Unit:
    """Returns what keeps a further parent of a module with the module, which it calls."""
    keys = {tree.of_several[each] for each in module.modules() if each in tree.of_several}
    output_bytes = tree.crossing_behind(module)
    return Unit(name, 0.0, 0.0, order, frozenset(keys), output_bytes=output_bytes)


def _unit(tree: _Tree, module: nn.Module, order: int) -> Unit:
    tree.placed.add(module)
    costs = tree.costs(module)
    if costs is not None:
        order = costs.order
    parameter_bytes = tree.own_parameter_bytes(module)
    children: list[Unit] = []
    below_compute = 0.0
    below_bytes = below_moved = 0
    for child_name, child in module.named_children():
        # A module that is never called stays behind its elder sibling.
        behind = children[-1].order if children else order
        if child in tree.placed:
            if any(each in tree.of_several for each in child.modules()):
                path = f"{tree.fakes.names[module]}.{child_name}".removeprefix(".")
                children.append(_stand_in(tree, child, path, behind))
            continue
        children.append(_unit(tree, child, behind))
        inner = [] if tree.profile is None else called_in(child, tree.profile)
        below_compute += tree.compute(*inner)
        below_bytes += sum(each.activation_bytes for each in inner)
        below_moved += sum(each.work.moved for each in inner)
    if costs is None:
        order = min((child.order for child in children), default=order)
    compute = max(0.0, tree.compute(costs) - below_compute) if costs else 0.0
    if costs and module is tree.fakes.model:  # the one that is split in any case
        moved = max(0, costs.work.moved - below_moved)
        compute = max(0.0, compute - tree.saved(moved))
    activations = max(0, costs.activation_bytes - below_bytes) if costs else 0
    if tree.profile is None:
        compute = parameter_bytes
    return Unit(
        name=tree.fakes.names[module],
        compute=compute,
        memory=STATE_FACTOR * parameter_bytes + activations,
        order=order,
        shared=frozenset(_keys(tree, module)),
        pinned=tree.pinned.get(module),
        children=tuple(sorted(children, key=lambda child: child.order)),
        output_bytes=tree.crossing_behind(module),
        splittable=bool(children) and _can_be_split(module, costs),
    )


def _keys(tree: _Tree, module: nn.Module) -> Iterator[str]:
    """Yields what names a module's own tensors where units on other ways hold them, too."""
    own = ((module, name) for name in (*module._parameters, *module._buffers))
    for slot in (*own, *tree.reached.get(module, ())):
        if slot in tree.shared:
            yield tree.shared[slot]
    if module in tree.of_several:
        yield tree.of_several[module]


def _can_be_split(module: nn.Module, costs: ModuleProfile | None) -> bool:
    """Whether the own forward of a module may run on another rank than its parts."""
    if costs is not None and costs.opaque:
        return False
    return not isinstance(module, DistributedModule) or module.has_split_children


def called_in(module: nn.Module, profile: Profile) -> list[ModuleProfile]:
    """Returns the outermost called modules at and below ``module``: a ModuleList is not called."""
    costs = profile.modules.get(module)
    if costs is not None:
        return [costs]
    return [each for child in module.children() for each in called_in(child, profile)]
