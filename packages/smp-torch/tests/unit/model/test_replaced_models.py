from __future__ import annotations

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.model.replacing import refuse_uses


def test_a_model_that_was_replaced_is_used_no_more() -> None:
    """It keeps the values that it had, and would be evaluated or saved with these."""
    net = nn.Linear(2, 2)
    refuse_uses(net)
    for use in (lambda: net(torch.ones(2)), net.state_dict, nn.Sequential(net).state_dict):
        with pytest.raises(UnsupportedError, match="this Linear is not what trains"):
            use()
