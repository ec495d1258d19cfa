"""What modules see of modules of Python, such as a module of settings."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.state import reach
from smdistributed.modelparallel.torch.state.holders import Owner
from smdistributed.modelparallel.torch.state.snapshot import Snapshot

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


class MadeUp(nn.Module):
    names = ("sc", "ale")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(SETTINGS, "".join(self.names), 1.0)


class Late(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(SETTINGS, "scale", 1.0)


@pytest.mark.parametrize("kind", [ByName, ByAttribute, MadeUp, Late])
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


@pytest.mark.parametrize("kind", [MadeUp, Late])
def test_what_comes_later_is_seen(kind: type[nn.Module]) -> None:
    vars(SETTINGS).pop("scale", None)
    snapshot = Snapshot([kind()])
    assert not snapshot.differences()
    SETTINGS.scale = 2.0
    assert snapshot.differences()
    snapshot.note_changes()
    snapshot.put_back()
    assert not hasattr(SETTINGS, "scale")


def test_what_names_are_made_up_of_is_seen_whole() -> None:
    SETTINGS.scale, SETTINGS.step = 1.0, 0
    for kind, is_seen in ((MadeUp, True), (Late, False)):
        snapshot = Snapshot([kind()])
        SETTINGS.step += 1
        assert bool(snapshot.differences()) == is_seen


def test_of_an_optimizer_its_state_is_seen_if_code_names_it() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])

    class OfGroups(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * optimizer.param_groups[0]["lr"]

    class OfState(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * len(optimizer.state)

    for kind, is_seen in ((OfGroups, False), (OfState, True)):
        snapshot = Snapshot([kind()])
        optimizer.state[kind] = {}
        assert bool(snapshot.differences()) == is_seen
        optimizer.param_groups[0]["lr"] *= 2
        assert snapshot.differences()


def test_a_class_that_nothing_can_be_set_on_is_left_alone() -> None:
    # Of an extension whose module does not say where it is installed.
    regex = pytest.importorskip("regex")
    net = Unrelated()
    net.pattern, net.step = regex.compile("a"), 0
    snapshot = Snapshot([net])
    net.step += 1
    snapshot.note_changes()
    snapshot.put_back()
    assert net.step == 0


def test_a_buffer_that_is_assigned_anew_is_no_tensor_put_into_a_container() -> None:
    norm = nn.BatchNorm1d(2)
    snapshot = Snapshot([norm])
    before, norm.running_mean = norm.running_mean, torch.ones(2)
    snapshot.note_changes()
    assert not snapshot.put_back()
    assert norm.running_mean is before


def test_what_the_library_puts_on_a_tensor_is_no_change() -> None:
    class OfList(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = [torch.ones(2)]

    module = OfList()
    snapshot = Snapshot([module])
    module.all[0].of_library = Owner(module, "all")
    assert not snapshot.differences()
    module.all[0].scale = 2.0
    assert snapshot.differences()


@pytest.mark.parametrize("place", ["probe_of_place.py", "probe_of_place/__init__.py"])
def test_what_is_installed_is_not_the_users_wherever_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).touch()
    module = types.ModuleType("probe_of_place")
    module.__file__ = str(tmp_path / place)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert reach.is_users(module.__name__)
    reach._is_installed.cache_clear()
    (tmp_path / "some-1.0.dist-info").mkdir()
    assert not reach.is_users(module.__name__)
