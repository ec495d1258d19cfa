"""What functions of torch mean to a recording, beside their results."""

from __future__ import annotations

import torch

from smdistributed.modelparallel.torch.compat.private.modes import set_grad_enabled

#: The question whether a tensor requires a gradient.
REQUIRING_GRADIENT = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
#: Questions about a tensor that leave no trace in a computation.
UNRECORDED = {
    set_grad_enabled,
    REQUIRING_GRADIENT,
    torch.Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.stride,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.element_size,
    torch.Tensor.__len__,
}

#: What puts hooks on gradients.
HOOKING_GRADIENTS = {
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
}
#: What gives code to a backward pass, or the nodes of autograd, which take hooks themselves.
GIVING_BACKWARD_CODE = {
    *HOOKING_GRADIENTS,
    torch.Tensor.grad_fn.__get__,  # type: ignore[union-attr]
}
#: What looks at a gradient, which the recording does not have.
READING_GRADIENTS = {torch.Tensor.grad.__get__}  # type: ignore[union-attr]

#: What decides whether a parameter trains.
SWITCHING_GRADIENTS = {
    torch.Tensor.requires_grad_,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
}
