"""Which values at cuts receive gradients."""

from __future__ import annotations

import torch
from recorded import Recorded
from torch import nn


class Net(nn.Module):
    """Writes to a view without gradients, behind a module of the other partition."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = torch.sigmoid(self.first(x))
        part = base[:, None]
        x = self.second(base)
        with torch.no_grad():
            part.mul_(0.5)
        return self.last(x + part.mean())  # type: ignore[no-any-return]


def test_a_tensor_that_is_written_to_without_gradients_hands_its_own_on() -> None:
    net = Net()
    recorded = Recorded(net, {"first": 0, "second": 1, "last": 0})

    def body(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(x).sum()
        recorded.backward(loss)
        return loss

    plan = recorded.plan(body, torch.ones(2, 4))
    (write,) = [node for node in plan.graph.nodes if node.changes]
    assert set(write.changes) <= plan.with_gradient
