"""Calls of a split model between steps, without gradients: to evaluate, to generate.

All ranks run the same script, so all of a pipeline make the call. For its time each has the tensors
of the others in their places, its slices of those that are in slices, and computes all of it. They
are kept for further calls, until a parameter changes or the next step begins.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import torch
from torch import nn

from smdistributed.modelparallel.common.groups import CommGroup
from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.record.fakes import FakeModel, Slot
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import slices_guarded

logger = logging.getLogger(__name__)

#: What a rank has, and what may be another in the next call.
_State = list[tuple[str, int, int]]


class WholeCalls:
    """What one model is called with between steps.

    Args:
        runtime: the state of the library in this process.
        holds: tells whether this rank has a tensor.
    """

    def __init__(self, runtime: TorchRuntime, holds: Callable[[Slot], bool]) -> None:
        self._runtime = runtime
        self._holds = holds
        self._states: list[_State] = []
        #: The tensors of the other ranks, by the identity of their fakes.
        self._others: dict[int, torch.Tensor] = {}
        self._replaced: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor | None]] = []
        self._depth = 0
        self._guarding = contextlib.ExitStack()
        self._is_told = False

    def begin(self, fakes: FakeModel) -> None:
        """Puts the tensors of the other ranks into the model. Collective: PP_GROUP.

        Args:
            fakes: of the model, whose own tensors are tensors of torch at present.
        """
        if not self._depth:
            self._follow(fakes)
            self._replace(fakes)
            self._guarding.enter_context(slices_guarded([fakes.slice_guard]))
        self._depth += 1

    def _replace(self, fakes: FakeModel) -> None:
        for (module, name), fake in fakes.slots.items():
            if not self._holds((module, name)):
                is_parameter = name in module._parameters
                table = module._parameters if is_parameter else module._buffers
                self._replaced.append((table, name, table[name]))  # type: ignore[arg-type]
                table[name] = self._others[id(fake)]  # type: ignore[assignment]

    def end(self) -> None:
        """Takes them out again."""
        self._depth -= 1
        if not self._depth:
            self._guarding.close()
            for table, name, tensor in self._replaced:
                table[name] = tensor
            self._replaced.clear()

    def let_go(self) -> None:
        """Keeps no tensors of other ranks: these are about to change."""
        self._states, self._others = [], {}

    def _follow(self, fakes: FakeModel) -> None:
        """Takes the tensors of the other ranks, unless they are those of the last call."""
        own = {
            fakes.slot_name((module, name)): getattr(module, name)
            for module, name in fakes.slots
            if self._holds((module, name))
        }
        state = [(name, version_of(each), each.data_ptr()) for name, each in own.items()]
        exchange = self._runtime.communicator.allgather
        purpose = "a call of a model between steps, which every rank makes"
        states = exchange(state, CommGroup.PP_GROUP, purpose=purpose)
        if states == self._states and self._others:
            return
        self._tell()
        values = {name: each.detach().cpu() for name, each in own.items()}
        found = {
            name: each
            for part in exchange(values, CommGroup.PP_GROUP, purpose=purpose)
            for name, each in part.items()
        }
        with torch.inference_mode(False), torch.no_grad():
            self._others = {
                id(fake): self._placed(found[fakes.slot_name(slot)], fake)
                for slot, fake in reversed(fakes.slots.items())
                if not self._holds(slot)
            }
        self._states = states

    def _placed(self, tensor: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        placed = tensor.to(self._runtime.device).clone()
        if isinstance(fake, nn.Parameter):
            return nn.Parameter(placed, requires_grad=False)
        return placed

    def _tell(self) -> None:
        if self._runtime.rank == 0 and not self._is_told:
            self._is_told = True
            logger.warning(
                "a model of several partitions is called between steps: each rank has all of it "
                "for that. Called in a function decorated with @smp.step, it stays where it is."
            )
