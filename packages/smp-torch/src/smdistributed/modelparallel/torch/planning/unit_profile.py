"""From what a recorded microbatch measured to a profile that is searched without a framework."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from smdistributed.modelparallel.common.planning.cost_tree import Unit
from smdistributed.modelparallel.common.planning.pass_tape import Span, without
from smdistributed.modelparallel.common.search.profile import Computation, Figures, UnitProfile
from smdistributed.modelparallel.torch.planning.compute_costs import ComputeCosts
from smdistributed.modelparallel.torch.planning.placement import called_in, cost_tree
from smdistributed.modelparallel.torch.planning.tape_timing import TimedTape
from smdistributed.modelparallel.torch.record.costs.meter import ModuleProfile, Profile
from smdistributed.modelparallel.torch.record.costs.work import Work
from smdistributed.modelparallel.torch.record.fakes import FakeModel


def unit_profile(
    fakes: FakeModel,
    made: Profile,
    optimizer_bytes: Mapping[int, float],
    is_small: Callable[[torch.Tensor], bool],
    sliced: Collection[nn.Module] = (),
    blocks: Collection[nn.Module] = (),
    timed: Sequence[Timed] = (),
) -> UnitProfile:
    """Returns the profile of a model.

    Args:
        fakes: the model.
        made: of a microbatch, with the bytes of all tensors that were made, and with a tape.
        optimizer_bytes: by the identity of a parameter, what the optimizer keeps for it.
        is_small: whether a parameter stays whole where others are in shards.
        sliced: the outermost modules that tensor-parallel ranks would share.
        blocks: of the model.
        timed: microbatches whose operations were timed.
    """
    tree = cost_tree(fakes, made, {}, ComputeCosts())
    modules = {name: module for module, name in fakes.names.items()}
    slices = _Slices(sliced, blocks)
    return _Builder(fakes, made, optimizer_bytes, is_small, modules, slices, timed).unit(
        tree, is_inside=False
    )


def beside_modules(
    work: Work, made_bytes: int, model: nn.Module, made: Profile, timed: Sequence[Timed] = ()
) -> Figures:
    """Returns the figures of what a step function computes outside of its model.

    Args:
        work: of the whole step function.
        made_bytes: likewise.
        model: that it calls.
        made, timed: as in ``unit_profile``.
    """
    called = called_in(model, made)

    def beside(profile: Profile) -> list[Span]:
        assert profile.tape is not None
        inside = [span for each in called_in(model, profile) for span in each.work.spans]
        return without([(0, profile.tape.num_operations)], inside)

    return Figures(
        timed=tuple((each.factor, each.tape.costs(beside(each.made))) for each in timed),
        computation=_computation(work - sum((each.work for each in called), Work())),
        made_bytes=max(0.0, made_bytes - sum(each.activation_bytes for each in called)),
    )


@dataclass(frozen=True)
class Timed:
    """A microbatch whose operations were timed.

    Attributes:
        factor: how many times as many examples it has as the one that was counted.
        made: its profile.
        tape: its operations.
    """

    factor: float
    made: Profile
    tape: TimedTape


class _Slices:
    """What tensor-parallel ranks share of a model, and how often they exchange for it.

    A block exchanges for each part that has weights, as attention and a feed-forward part are: it
    gathers what the part is given, and sums what it gives. Where maps lie side by side, two of them
    are such a part.

    Args:
        roots: the outermost modules that they would share.
        blocks: of the model.
    """

    def __init__(self, roots: Collection[nn.Module], blocks: Collection[nn.Module]) -> None:
        self._inside = {each for root in roots for each in root.modules()}
        self._exchanges: dict[nn.Module, float] = {}
        in_blocks: set[nn.Module] = set()
        for block in self._inside.intersection(blocks):
            in_blocks.update(block.modules())
            parts = [child for child in block.children() if any(map(_is_cut, child.parameters()))]
            self._exchanges[block] = sum(1.0 if list(part.children()) else 0.5 for part in parts)
        for module in self._inside - in_blocks:
            if any(map(_is_cut, module._parameters.values())):
                self._exchanges[module] = 1.0 if module in roots else 0.5

    def exchanges(self, module: nn.Module) -> float:
        """Returns how often what a module gives is gathered and summed in a forward pass."""
        return self._exchanges.get(module, 0.0)

    def shares(self, module: nn.Module, parameter: torch.Tensor) -> bool:
        """Whether each rank holds a part of a parameter."""
        return module in self._inside and _is_cut(parameter)


def _is_cut(parameter: torch.Tensor | None) -> bool:
    """Whether a parameter is a weight of a map or of an embedding, and no vector."""
    return parameter is not None and parameter.dim() > 1


@dataclass
class _Builder:
    """What building the tree needs to know."""

    fakes: FakeModel
    made: Profile
    optimizer_bytes: Mapping[int, float]
    is_small: Callable[[torch.Tensor], bool]
    modules: Mapping[str, nn.Module]
    slices: _Slices
    timed: Sequence[Timed] = ()
    counted: set[int] = field(default_factory=set)

    def unit(self, unit: Unit, *, is_inside: bool) -> UnitProfile:
        """Returns the profile of a unit.

        Args:
            unit: of the tree that the partitioner gets.
            is_inside: whether the backward pass computes what it lies in again.
        """
        module = self.modules[unit.name]
        is_repeated = is_inside or self._is_repeated(module)
        own = self._figures(unit, module, is_repeated=is_repeated)
        return UnitProfile(
            unit.name,
            unit.order,
            unit.splittable,
            own,
            unit.output_bytes,
            tuple(sorted(unit.shared)),
            tuple(self.unit(child, is_inside=is_repeated) for child in unit.children),
            tuple(self._own_spans(unit, module, self.made)),
            is_again=is_repeated and not is_inside,
        )

    def _is_repeated(self, module: nn.Module) -> bool:
        """Whether a checkpointed call has called a module, or is all that the module does."""
        costs = self.made.modules.get(module)
        if costs is None or costs.repeated:
            return costs is not None
        below = [each for child in module.children() for each in called_in(child, self.made)]
        return bool(below) and all(each.repeated for each in below)

    def _figures(self, unit: Unit, module: nn.Module, *, is_repeated: bool) -> Figures:
        computation = _computation(
            self._own_work(unit, module), num_modules=module in self.made.modules
        )
        parameters = self._own_parameters(module)
        trained = [each for _, each in parameters if each.requires_grad]
        return Figures(
            computation=computation,
            recomputed=computation if is_repeated else Computation(),
            parameter_bytes=sum(_bytes(each) for _, each in parameters),
            gradient_bytes=sum(map(_bytes, trained)),
            trained_elements=sum(each.numel() for each in trained),
            small_elements=sum(each.numel() for each in trained if self.is_small(each)),
            optimizer_bytes=sum(self.optimizer_bytes.get(key, 0.0) for key, _ in parameters),
            made_bytes=max(0.0, self._own_bytes(unit, module)),
            timed=tuple(
                (each.factor, each.tape.costs(self._own_spans(unit, module, each.made)))
                for each in self.timed
            ),
            sliced_elements=sum(
                each.numel() for each in trained if self.slices.shares(module, each)
            ),
            exchanged_bytes=self.slices.exchanges(module) * unit.output_bytes,
        )

    def _below(self, unit: Unit, made: Profile) -> list[ModuleProfile]:
        """Returns the outermost called modules below a unit."""
        children = (self.modules[child.name] for child in unit.children)
        return [each for child in children for each in called_in(child, made)]

    def _own_work(self, unit: Unit, module: nn.Module) -> Work:
        costs = self.made.modules.get(module)
        if costs is None:
            return Work()
        return costs.work - sum((each.work for each in self._below(unit, self.made)), Work())

    def _own_spans(self, unit: Unit, module: nn.Module, made: Profile) -> list[Span]:
        costs = made.modules.get(module)
        if costs is None:
            return []
        below = [span for each in self._below(unit, made) for span in each.work.spans]
        return without(costs.work.spans, below)

    def _own_bytes(self, unit: Unit, module: nn.Module) -> float:
        costs = self.made.modules.get(module)
        if costs is None:
            return 0.0
        return float(
            costs.activation_bytes
            - sum(each.activation_bytes for each in self._below(unit, self.made))
        )

    def _own_parameters(self, module: nn.Module) -> list[tuple[int, torch.Tensor]]:
        """Returns a module's own parameters, by identity; shared ones with the first of them."""
        found: list[tuple[int, torch.Tensor]] = []
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in self.counted:
                self.counted.add(id(parameter))
                found.append((id(parameter), parameter))
        return found


def _computation(work: Work, num_modules: int = 0) -> Computation:
    return Computation(
        of_weights=max(0.0, float(work.weight_products)),
        of_others=max(0.0, float(work.products - work.weight_products)),
        moved_bytes=max(0.0, float(work.moved_bytes)),
        num_kernels=max(0.0, float(work.kernels)),
        num_modules=float(num_modules),
    )


def _bytes(tensor: torch.Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())
