import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.optimizer.checks import count_update


def test_an_update_by_one_kernel_is_counted() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()
    before = version_of(parameter)  # as kernels leave it
    count_update(optimizer)
    assert version_of(parameter) > before
