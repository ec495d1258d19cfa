"""Records a step in this process, as the ranks of a pipeline would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from smdistributed.modelparallel.torch.plan.placement import Placement, decide
from smdistributed.modelparallel.torch.plan.segments import Plan, cut
from smdistributed.modelparallel.torch.random.keys import StepRandom
from smdistributed.modelparallel.torch.record.capture import Capture, capture, profile
from smdistributed.modelparallel.torch.record.decisions import OwnDecisions
from smdistributed.modelparallel.torch.record.fakes import FakeModel
from smdistributed.modelparallel.torch.record.leaf_memory import LeafMemory
from smdistributed.modelparallel.torch.record.recorder import Recorder

CPU = torch.device("cpu")


class Recorded:
    """One model, placed on partitions by module name, and what a step makes of it."""

    def __init__(self, module: nn.Module, partitions: Mapping[str, int], num: int = 2) -> None:
        self.module = module
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.fakes = FakeModel(module, self.mode, CPU)
        modules = dict(module.named_modules())
        self.pinned = {modules[name]: index for name, index in partitions.items()}
        self.num = num
        self.recorder: Recorder | None = None
        self.memory = LeafMemory()
        self.random = StepRandom(CPU)

    def place(self, function: Callable[..., Any], *args: Any) -> Placement:
        self.recorder = None
        costs = profile(
            [self.fakes], function, args, {}, self.mode, CPU, OwnDecisions(), self.random
        )
        return decide(self.fakes, costs, self.pinned, self.num, 0.8)

    def capture(self, function: Callable[..., Any], *args: Any) -> tuple[Capture, Placement]:
        placement = self.place(function, *args)

        def note(recorder: Recorder) -> None:
            self.recorder = recorder

        captured = capture(
            [self.fakes],
            function,
            args,
            {},
            self.mode,
            CPU,
            placement.leaves,
            OwnDecisions(),
            self.random,
            self.memory,
            on_start=note,
        )
        return captured, placement

    def plan(self, function: Callable[..., Any], *args: Any) -> Plan:
        captured, placement = self.capture(function, *args)
        return cut(captured.graph, placement.partition_of, placement.owner_of)

    def backward(self, loss: torch.Tensor) -> None:
        """Stands for ``model.backward`` in a body."""
        if self.recorder is not None:
            self.recorder.backward(loss, None)
