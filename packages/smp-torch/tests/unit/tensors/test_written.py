import torch

from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.tensors.written import WritesCounted, written_by


def _fused_update(parameter: torch.Tensor, buffer: torch.Tensor) -> None:
    torch._fused_sgd_(
        [parameter],
        [torch.ones(2)],
        [buffer],
        weight_decay=0.0,
        momentum=0.9,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def test_writes_of_kernels_that_leave_versions_alone_are_counted() -> None:
    parameter, buffer = torch.ones(2), torch.ones(2)
    _fused_update(parameter, buffer)
    assert version_of(parameter) == 0  # if that changes, what follows has no merit
    with WritesCounted():
        _fused_update(parameter, buffer)
    assert version_of(parameter) == version_of(buffer) == 1


def test_writes_that_versions_count_are_counted_once() -> None:
    written, read = torch.ones(2), torch.ones(2)
    with WritesCounted():
        written.add_(read)
    assert (version_of(written), version_of(read)) == (1, 0)


def test_what_an_operation_writes_to_is_said_by_its_schema() -> None:
    first, second, out = torch.ones(2), torch.ones(2), torch.empty(2)
    assert not written_by(torch.ops.aten.add.Tensor, (first, second), {})
    assert written_by(torch.ops.aten.add.out, (first, second), {"out": out})[0] is out
    many = written_by(torch.ops.aten._foreach_mul_.Scalar, ([first, second], 2.0), {})
    assert list(map(id, many)) == [id(first), id(second)]
