from __future__ import annotations

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.model.replacing import _tell_names, refuse_uses


def test_a_model_that_was_replaced_is_used_no_more() -> None:
    """It keeps the values that it had, and would be evaluated or saved with these."""
    net = nn.Linear(2, 2)
    refuse_uses(net, nn.Linear(1, 1))
    for use in (lambda: net(torch.ones(2)), net.state_dict, nn.Sequential(net).state_dict):
        with pytest.raises(UnsupportedError, match="this Linear is not what trains"):
            use()


class Generating(nn.Linear):
    def generate(self, start: int) -> str:
        return f"of the old values, from {start}"


class Distributed(nn.Linear):
    stands_for = Generating

    def generate(self, start: int) -> str:
        return f"from {start}"


def test_what_makes_a_model_of_the_current_values_is_called_there() -> None:
    net, made = Generating(2, 2), Distributed(2, 2)
    refuse_uses(net, made)
    assert net.generate(3) == "from 3"
    assert not hasattr(net, "save_pretrained")
    del made
    with pytest.raises(UnsupportedError, match="this Generating is not what trains"):
        net.generate(3)


def test_names_that_are_others_than_before_are_told(caplog: pytest.LogCaptureFixture) -> None:
    _tell_names({"head.weight", "bias"}, {"head.weight", "bias"})
    assert not caplog.records
    _tell_names({"head.weight", "out.LayerNorm.weight"}, {"head.weight", "layernorm.weight"})
    (record,) = caplog.records
    assert "out.LayerNorm.weight and 0 others are gone" in record.getMessage()
    assert "there are layernorm.weight and 0 others" in record.getMessage()
