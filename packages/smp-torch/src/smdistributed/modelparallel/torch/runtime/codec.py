"""How objects with tensors become bytes.

Objects keep their classes. A tensor from an accelerator arrives on the receiver's own device, any
other tensor on the host.

Source: smd_model_parallel_change_log.rst, 1.1.0 and 1.2.0.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from smdistributed.modelparallel.common.comm.communicator import Codec


class _TensorPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or obj.layout != torch.strided:
            return NotImplemented
        is_parameter = isinstance(obj, torch.nn.Parameter)
        if obj.device.type not in ("cpu", "meta"):
            return _to_own_device, (obj.detach().cpu(), obj.requires_grad, is_parameter)
        if obj.device.type == "cpu" and obj.untyped_storage().nbytes() > obj.nbytes:
            # A view would take the whole storage along.
            return _restore, (obj.detach().clone(), obj.requires_grad, is_parameter)
        return NotImplemented


def _to_own_device(tensor: torch.Tensor, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        tensor = tensor.to(accelerator)
    return _restore(tensor, requires_grad, is_parameter)


def _restore(tensor: torch.Tensor, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _dumps(obj: object) -> bytes:
    file = io.BytesIO()
    _TensorPickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
    return file.getvalue()


TORCH_CODEC = Codec(dumps=_dumps)
