"""Optimizer state by name: what one rank keeps, and what several ranks have together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.common.errors import CheckpointError
from smdistributed.modelparallel.torch.optimizer import state as optimizer_state

GROUPS = [["b", "c"], ["a"]]


def numbered() -> dict[str, Any]:
    values = [nn.Parameter(torch.full((2,), float(number))) for number in range(3)]
    groups = [{"params": values[:2], "lr": 0.5}, {"params": values[2:]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    for value in values:
        value.grad = value.detach().clone()
    optimizer.step()
    return optimizer.state_dict()


def test_each_rank_keeps_its_own_and_together_they_have_all() -> None:
    whole = numbered()
    parts = [optimizer_state.to_names(whole, GROUPS, kept) for kept in ({"c"}, {"a", "b"})]
    assert [list(part["state"]) for part in parts] == [["c"], ["b", "a"]]
    assert optimizer_state.names_in(parts[0]) == [["c"], []]
    merged = optimizer_state.merge(parts)
    assert optimizer_state.is_named(merged)
    assert [set(names) for names in optimizer_state.names_in(merged)] == [{"b", "c"}, {"a"}]
    assert optimizer_state.to_numbers(merged, GROUPS)["param_groups"] == whole["param_groups"]
    again = optimizer_state.to_numbers(merged, GROUPS)["state"]
    assert again.keys() == whole["state"].keys()
    assert all(again[number] is values for number, values in whole["state"].items())


def test_another_order_finds_its_parameters() -> None:
    named = optimizer_state.to_names(numbered(), GROUPS, {"a", "b", "c"})
    other = optimizer_state.to_numbers(named, [["c", "b"], ["a"]])
    assert other["state"][0] is named["state"]["c"]


def test_names_of_parameters_that_torch_keeps_are_not_taken_for_settings() -> None:
    group = {"params": [0], "param_names": ["x"], "lr": 1.0}
    assert optimizer_state.settings(group) == {"lr": 1.0}


def test_different_groups_do_not_merge() -> None:
    parts = [{"state": {}, "param_groups": [{"params": []}] * count} for count in (1, 2)]
    with pytest.raises(CheckpointError, match=r"the parts have \[1, 2\]"):
        optimizer_state.merge(parts)


def part(own: list[str], **settings: object) -> dict[str, Any]:
    return {"state": {}, "param_groups": [{"lr": 0.5, **settings, "params": own}]}


def test_a_group_is_that_of_ranks_with_parameters_in_it() -> None:
    parts = [part([], lr=0.1), part(["a"], step=3), part([]), part(["b"], step=3)]
    (group,) = optimizer_state.merge(parts)["param_groups"]
    assert group == {"lr": 0.5, "step": 3, "params": ["a", "b"]}
    (group,) = optimizer_state.merge([part([]), part([])])["param_groups"]
    assert group == {"lr": 0.5, "params": []}


def test_groups_that_differ_do_not_merge() -> None:
    with pytest.raises(CheckpointError, match="group 0 has step 3 on one rank and 2 on another"):
        optimizer_state.merge([part(["a"], step=3), part(["b"], step=2)])


def test_the_first_missing_parameter_is_named() -> None:
    named = optimizer_state.to_names(numbered(), GROUPS, {"b"})
    optimizer_state.check_covers(named, GROUPS, {"b"})
    with pytest.raises(CheckpointError, match="lacks parameter c in parameter group 0"):
        optimizer_state.check_covers(named, GROUPS, {"a", "b", "c"})
