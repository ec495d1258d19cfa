"""What functions of torch ask of a tensor of one partition."""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.tensors import ABOUT_TENSORS

_TENSOR: Any = torch.Tensor


def _of(names: str) -> frozenset[Any]:
    found = set()
    for name in names.split():
        each = getattr(_TENSOR, name, None)
        if each is not None:
            found.add(each if callable(each) else each.__get__)
    return frozenset(found)


#: What concerns the object itself.
OBJECT = frozenset(
    {*_of("__hash__ register_hook register_post_accumulate_grad_hook"), *ABOUT_TENSORS}
)
#: What asks for no values.
NO_VALUES = frozenset(
    {
        *_of("device layout dtype shape size dim ndim ndimension numel nelement element_size"),
        *_of("itemsize nbytes is_cuda is_cpu is_xpu is_mps is_meta is_sparse is_quantized stride"),
        *_of("is_mkldnn is_nested is_floating_point is_complex is_signed __len__ get_device"),
        *_of("is_inference is_leaf grad_fn requires_grad is_contiguous storage_offset name"),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
#: What tells values to Python, or gives them to what is no tensor.
VALUES = _of(
    "item __bool__ __float__ __int__ __index__ __complex__ tolist numpy __array__ __format__ "
    "__contains__ is_nonzero"
)
#: What would give away memory that has no values.
MEMORY = _of("data_ptr untyped_storage storage __reduce_ex__ share_memory_ __dlpack__ is_shared")
DIFFERENTIATING = frozenset({_TENSOR.backward, torch.autograd.grad, torch.autograd.backward})
#: Give a tensor like another one, whatever its values.
LIKE = frozenset(
    {torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like}
    | {torch.rand_like, torch.randn_like, torch.randint_like}
    | _of("new_zeros new_ones new_full new_empty new_tensor")
)
