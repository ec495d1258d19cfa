"""Which backward pass completes which gradient, without processes."""

from __future__ import annotations

import torch
from recorded import Recorded
from torch import nn

from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.common.planning.simulator import build_schedule
from smdistributed.modelparallel.torch.planning.final_gradients import final_gradients


class Net(nn.Module):
    """Layers 0, 1 and 0 again; rank 0 has a scale too, and a layer that only no_grad uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(4))
        self.without_gradient = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = self.without_gradient(x)
        x = self.layers[0](x) * self.scale
        x = torch.tanh(self.layers[1](x))
        return self.layers[2](self.layers[0](x)) + shift.mean()


def test_the_last_pass_that_reaches_a_parameter_completes_it() -> None:
    module = Net()
    step = Recorded(module, {"layers.0": 0, "layers.1": 1, "layers.2": 0, "without_gradient": 0})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(x).square().mean()
        step.backward(loss)
        return loss

    plan = step.plan(body, torch.rand(2, 4))
    num_microbatches = 3
    schedule = build_schedule(
        plan.segment_graph(2), num_microbatches, "interleaved", num_microbatches
    ).schedule
    plans = [plan] * num_microbatches
    names = {parameter: name for name, parameter in module.named_parameters()}
    for rank, expected in enumerate(
        (
            {"scale", "layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"},
            {"layers.1.weight", "layers.1.bias"},
        )
    ):
        passes = [each for each in schedule.ranks[rank] if each.kind is Kind.BACKWARD]
        completed = final_gradients(plans, schedule.ranks[rank])
        assert len(completed) == len(passes)
        named = [{names[each] for each in parameters} for parameters in completed]
        assert expected <= set().union(*named)
        assert sum(map(len, named)) == len(set().union(*named))  # each once
        # What is used at both ends is complete when the first segment's passes are over.
        last = max(i for i, each in enumerate(passes) if each.segment == rank)
        assert expected - {"layers.2.weight", "layers.2.bias"} <= named[last]
