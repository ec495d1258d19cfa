"""Which modules of a model draw random numbers, by the names that their keys have."""

from __future__ import annotations

from torch import nn

from smdistributed.modelparallel.torch.model.compiled import CompiledModules
from smdistributed.modelparallel.torch.model.holder import Holder
from smdistributed.modelparallel.torch.random.keys import StepRandom
from smdistributed.modelparallel.torch.random.modules import RandomStreams
from smdistributed.modelparallel.torch.record.costs.meter import Draws, Profile


class DrawingModules:
    """The random streams of one model, kept up to date with its modules.

    Args:
        random: of the step in progress.
        holder: of the model.
        compiled: which of its modules are.
    """

    def __init__(self, random: StepRandom, holder: Holder, compiled: CompiledModules) -> None:
        self._holder = holder
        self._compiled = compiled
        self._streams = RandomStreams(random, compiled)
        self.learn()

    def learn(self) -> None:
        """Finds out which modules draw random numbers, each in its next call."""
        self._streams.learn(self._by_name())

    def refresh(self) -> None:
        """Takes the modules that the model has now."""
        self._streams.keep(self._by_name())

    def adopt(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        """Takes a module that code adds during a step; its draws are learned in its first call."""
        fakes = self._holder.fakes
        if parent in fakes.names:
            prefix = f"{fakes.draw_name(parent)}.{name}"
            self._streams.learn(
                {
                    f"{prefix}.{inner}".rstrip("."): module
                    for inner, module in child.named_modules()
                    if module not in fakes.names
                }
            )

    def take(self, profile: Profile) -> None:
        """Takes from a profile which modules draw."""
        fakes, root_of = self._holder.fakes, self._compiled.root_of
        draws: dict[nn.Module, Draws] = {}
        for module, costs in profile.modules.items():
            if module in fakes.names:
                root = root_of(module)
                draws[root] = draws.get(root, Draws()).union(costs.draws)
        self._streams.add(
            {fakes.draw_name(module): (module, each) for module, each in draws.items()}
        )

    def _by_name(self) -> dict[str, nn.Module]:
        fakes, root_of = self._holder.fakes, self._compiled.root_of
        return {
            fakes.draw_name(module): module for module in fakes.names if root_of(module) is module
        }
