"""Records a step in this process, as the ranks of a pipeline would."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from smdistributed.modelparallel.torch.planning.compute_costs import ComputeCosts
from smdistributed.modelparallel.torch.planning.placement import Placement, decide
from smdistributed.modelparallel.torch.planning.segments import Plan, cut
from smdistributed.modelparallel.torch.planning.spread_gradients import spread_gradients
from smdistributed.modelparallel.torch.random.keys import StepRandom
from smdistributed.modelparallel.torch.record.costs.meter import Meter
from smdistributed.modelparallel.torch.record.costs.work import Operations
from smdistributed.modelparallel.torch.record.fakes import FakeModel
from smdistributed.modelparallel.torch.record.passes import Passed
from smdistributed.modelparallel.torch.record.questions.decisions import OwnDecisions
from smdistributed.modelparallel.torch.record.recorder import Recorder
from smdistributed.modelparallel.torch.record.scene import Scene
from smdistributed.modelparallel.torch.record.trace.tree import Trace, Way
from smdistributed.modelparallel.torch.tensors.nested import tensors_in

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
        self.random = StepRandom(CPU)
        self.numbers = itertools.count()
        self.traces: dict[Any, Trace] = {}
        self.placement: Placement | None = None
        self.scene = Scene([self.fakes], {}, [self.fakes])
        self.costs = ComputeCosts()
        self.memory_weight = 0.8
        self.operations: Operations | None = None

    def _recorder(self) -> Recorder:
        meter = Meter(self.mode, self.operations)
        return Recorder(self.scene, self.mode, CPU, self.random, meter, self.numbers.__next__)

    def trace(self, args: Any) -> Trace:
        """Returns the trace of microbatches with such arguments."""
        tensors = tensors_in(args)
        key = tuple((tuple(each.shape), each.dtype) for each in tensors)
        if key not in self.traces:
            with self.mode:
                self.traces[key] = Trace([self.mode.from_tensor(each) for each in tensors])
        return self.traces[key]

    def passes(self, function: Callable[..., Any], *args: Any) -> Passed:
        """Runs the Python of one microbatch; decides the partition when it is the first."""
        self.recorder = self._recorder()
        with self.recorder.on_fakes():
            passed = self.recorder.run(self.trace(args), function, (args, {}), OwnDecisions())
        if self.placement is None:
            self.placement = decide(
                self.fakes, passed.profile, self.pinned, self.num, self.memory_weight, self.costs
            )
            self.scene = Scene([self.fakes], self.placement.leaves)
            self.recorder = self._recorder()
            with self.recorder.on_fakes():
                passed.way = self.recorder.close(passed)
        self.recorder = None
        return passed

    def place(self, function: Callable[..., Any], *args: Any) -> Placement:
        """Decides the partition, and returns it."""
        self.passes(function, *args)
        assert self.placement is not None
        return self.placement

    def way(self, function: Callable[..., Any], *args: Any) -> Way:
        """Returns the way of a microbatch."""
        way = self.passes(function, *args).way
        assert way is not None
        return way

    def plan(self, function: Callable[..., Any], *args: Any) -> Plan:
        """Runs a microbatch twice and returns the plan of its way."""
        self.passes(function, *args)
        way = self.way(function, *args)
        assert self.placement is not None
        places = self.placement.partition_of, self.placement.owner_of
        spread_gradients(way.graph, *places)
        return cut(way.graph, *places, self.costs)

    def backward(self, loss: torch.Tensor) -> None:
        """Stands for ``model.backward`` in a body."""
        if self.recorder is not None:
            self.recorder.backward(self.module, loss, None)
