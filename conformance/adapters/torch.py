"""PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import smdistributed.modelparallel.torch as smp
from conformance.adapters.base import WIDTH, Adapter, Array
from smdistributed.modelparallel.common.config import Config
from smdistributed.modelparallel.torch.state.caches import FunctionCaches


class Net(nn.Module):
    """Four layers with known weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("shift", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [batch, WIDTH] to the same."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + self.shift


class TorchAdapter(Adapter):
    """See ``Adapter``."""

    name = "torch"
    smp = smp

    @property
    def config(self) -> Config:
        found: Config = smp.state.cfg
        return found

    def reset(self) -> None:
        torch.manual_seed(0)

    def tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(np.asarray(array)).to(self.device)

    def array(self, tensor: torch.Tensor) -> Array:
        found: Array = tensor.detach().cpu().numpy()
        return found

    def is_tensor(self, obj: Any) -> bool:
        return isinstance(obj, torch.Tensor)

    def mean(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mean()

    def net(self) -> Net:
        """Returns the plain module of ``model``."""
        return Net()

    def model(self) -> Any:
        return smp.DistributedModel(self.net())

    def reference(self, x: Array) -> Array:
        with torch.no_grad():
            found: Array = self.net()(torch.from_numpy(x)).numpy()
        return found

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        if torch.cuda.is_available():
            return torch.device("cuda", smp.local_rank())
        return torch.device("cpu")


def make() -> TorchAdapter:
    """Returns the adapter."""
    # The first one imports much; forks of this process need not do it again.
    FakeTensorMode()
    return TorchAdapter()


def prepare() -> None:
    """Looks through all modules for caches, as the first recording of each copy would."""
    FunctionCaches().look_for_new()
