"""Exchanges on fakes: shapes, and on a host as much memory meanwhile as exchanges take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from smdistributed.modelparallel.torch.collectives.shapes import ShapesOfFakes
from smdistributed.modelparallel.torch.compat.private.modes import TorchDispatchMode
from smdistributed.modelparallel.torch.record.costs.meter import Meter
from smdistributed.modelparallel.torch.record.costs.tape_writer import TapeWriter
from smdistributed.modelparallel.torch.tensors.nested import tensors_in

#: Of a rank's part.
ROWS, WIDTH = 4, 8
PART = 4 * ROWS * WIDTH


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations on a tape."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = TapeWriter({})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.tape.note(tensors_in((args, kwargs or {})), tensors_in(out))
        return out


@pytest.mark.parametrize(("device", "parts"), [("cpu", 2 + 2 + 2), ("cuda", 2 + 1)])
def test_a_sum_on_a_host_lays_parts_side_by_side(device: str, parts: int) -> None:
    backend: Any = SimpleNamespace(size=2, rank=1)
    collectives = ShapesOfFakes(backend)
    with FakeTensorMode(), _Noting() as noting:
        tensor = torch.empty(2 * ROWS, WIDTH, device=device)
        found = collectives.scatter_sum(tensor, [ROWS, ROWS])
    assert found.shape == (ROWS, WIDTH)
    assert found.device.type == device
    whole = noting.tape.tape().memory([(0, noting.tape.num_operations)])
    assert whole.forward == parts * PART


def test_what_modules_make_is_counted_alike_on_hosts_and_gpus() -> None:
    backend: Any = SimpleNamespace(size=2, rank=1)
    collectives = ShapesOfFakes(backend)

    def counted(device: str) -> int:
        with FakeTensorMode() as mode:
            tensor = torch.empty(2 * ROWS, WIDTH, device=device)
            with Meter(mode) as meter:
                collectives.scatter_sum(tensor, [ROWS, ROWS])
                collectives.swap([tensor, tensor], [tensor.shape] * 2)
        return meter.bytes

    assert counted("cpu") == counted("cuda") == 5 * PART
