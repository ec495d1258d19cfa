"""From what a recorded microbatch measured to a profile that is searched without a framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from smdistributed.modelparallel.common.planning.cost_tree import Unit
from smdistributed.modelparallel.common.search.profile import Computation, Figures, UnitProfile
from smdistributed.modelparallel.torch.planning.compute_costs import ComputeCosts
from smdistributed.modelparallel.torch.planning.placement import called_in, cost_tree
from smdistributed.modelparallel.torch.record.costs.meter import ModuleProfile, Profile
from smdistributed.modelparallel.torch.record.costs.work import Work
from smdistributed.modelparallel.torch.record.fakes import FakeModel


def unit_profile(
    fakes: FakeModel,
    made: Profile,
    kept: Profile,
    optimizer_bytes: Mapping[int, float],
    is_small: Callable[[torch.Tensor], bool],
) -> UnitProfile:
    """Returns the profile of a model.

    Args:
        fakes: the model.
        made: of a microbatch, with the bytes of all tensors that were made.
        kept: of the same, with those that autograd keeps.
        optimizer_bytes: by the identity of a parameter, what the optimizer keeps for it.
        is_small: whether a parameter stays whole where others are in shards.
    """
    tree = cost_tree(fakes, made, {}, ComputeCosts())
    modules = {name: module for module, name in fakes.names.items()}
    return _Builder(fakes, made, kept, optimizer_bytes, is_small, modules).unit(
        tree, is_inside=False
    )


def beside_modules(
    work: Work, made_bytes: int, kept_bytes: int, model: nn.Module, made: Profile, kept: Profile
) -> Figures:
    """Returns the figures of what a step function computes outside of its model.

    Args:
        work: of the whole step function.
        made_bytes, kept_bytes: likewise.
        model: that it calls.
        made, kept: as in ``unit_profile``.
    """
    called = called_in(model, made)
    kept_inside = sum(each.activation_bytes for each in called_in(model, kept))
    return Figures(
        computation=_computation(work - sum((each.work for each in called), Work())),
        made_bytes=max(0.0, made_bytes - sum(each.activation_bytes for each in called)),
        kept_bytes=max(0.0, kept_bytes - kept_inside),
    )


@dataclass
class _Builder:
    """What building the tree needs to know."""

    fakes: FakeModel
    made: Profile
    kept: Profile
    optimizer_bytes: Mapping[int, float]
    is_small: Callable[[torch.Tensor], bool]
    modules: Mapping[str, nn.Module]
    counted: set[int] = field(default_factory=set)

    def unit(self, unit: Unit, *, is_inside: bool) -> UnitProfile:
        """Returns the profile of a unit.

        Args:
            unit: of the tree that the partitioner gets.
            is_inside: whether the backward pass computes what it lies in again.
        """
        module = self.modules[unit.name]
        is_repeated = is_inside or self._is_repeated(module)
        own = self._figures(unit, module, is_repeated=is_repeated, is_outermost=not is_inside)
        return UnitProfile(
            unit.name,
            unit.order,
            unit.splittable,
            own,
            unit.output_bytes,
            tuple(sorted(unit.shared)),
            tuple(self.unit(child, is_inside=is_repeated) for child in unit.children),
        )

    def _is_repeated(self, module: nn.Module) -> bool:
        """Whether a checkpointed call has called a module, or is all that the module does."""
        costs = self.made.modules.get(module)
        if costs is None or costs.repeated:
            return costs is not None
        below = [each for child in module.children() for each in called_in(child, self.made)]
        return bool(below) and all(each.repeated for each in below)

    def _figures(
        self, unit: Unit, module: nn.Module, *, is_repeated: bool, is_outermost: bool
    ) -> Figures:
        computation = _computation(
            self._own_work(unit, module), num_modules=module in self.made.modules
        )
        kept, again = max(0.0, self._own_bytes(unit, module, self.kept)), 0.0
        if is_repeated:
            kept = unit.output_bytes if is_outermost else 0.0  # as large as what it is given
            whole = self.kept.modules.get(module)
            again = float(whole.activation_bytes) if is_outermost and whole else 0.0
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
            made_bytes=max(0.0, self._own_bytes(unit, module, self.made)),
            kept_bytes=kept,
            again_bytes=again,
        )

    def _below(self, unit: Unit, profile: Profile) -> list[ModuleProfile]:
        """Returns the outermost called modules below a unit."""
        children = (self.modules[child.name] for child in unit.children)
        return [each for child in children for each in called_in(child, profile)]

    def _own_work(self, unit: Unit, module: nn.Module) -> Work:
        costs = self.made.modules.get(module)
        if costs is None:
            return Work()
        below = sum((each.work for each in self._below(unit, self.made)), Work())
        return costs.work - below

    def _own_bytes(self, unit: Unit, module: nn.Module, profile: Profile) -> float:
        costs = profile.modules.get(module)
        if costs is None:
            return 0.0
        below = sum(each.activation_bytes for each in self._below(unit, profile))
        return float(costs.activation_bytes - below)

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
