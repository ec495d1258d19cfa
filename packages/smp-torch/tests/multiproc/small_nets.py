"""Models of the checkpoint tests; nothing of the library is imported, as where one exports to."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 16


class DropoutNet(nn.Module):
    """Linear layers with running statistics and dropout, and a buffer of its own."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2))
                for _ in range(4)
            )
        )
        self.register_buffer("offset", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x) + self.offset
        return out
