from __future__ import annotations

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.model.distributed import check_made


def test_a_model_has_all_its_shapes_before_it_is_distributed() -> None:
    net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    with pytest.raises(UnsupportedError, match=r"0\.weight has no shape before .* once"):
        check_made(net)
    net(torch.ones(2, 3))
    check_made(net)
