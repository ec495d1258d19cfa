"""What modules see of modules of Python, such as a module of settings."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.record.undo import Snapshot

SETTINGS = types.ModuleType("probe_of_settings")


class ByName(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * SETTINGS.scale


class ByAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.settings = SETTINGS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.settings.scale


class Unrelated(nn.Module):
    step = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.step


@pytest.mark.parametrize("kind", [ByName, ByAttribute])
def test_what_code_reads_of_a_module_is_watched(kind: type[nn.Module]) -> None:
    SETTINGS.scale, SETTINGS.step = 1.0, 0
    snapshot = Snapshot([kind(), Unrelated()])
    assert not snapshot.differences()
    SETTINGS.scale = 2.0
    assert snapshot.differences()


def test_what_only_other_code_names_is_not() -> None:
    SETTINGS.scale, SETTINGS.step = 1.0, 0
    snapshot = Snapshot([ByName(), Unrelated()])
    SETTINGS.step = 1  # a counter, say
    assert not snapshot.differences()
