from __future__ import annotations

import torch
from torch import nn

from smdistributed.modelparallel.torch.model.distributed import unmade


def test_a_model_says_which_module_has_no_shape_yet() -> None:
    net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    assert "0 (LazyLinear) has parameters without a shape" in str(unmade(net))
    net(torch.ones(2, 3))
    assert unmade(net) is None
