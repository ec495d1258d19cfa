"""What functions of torch mean, where a call and its result do not tell.

The one table of it: each set has its reader's question as a name. ``torch.Tensor.shape.__get__`` is
a function too, which Python calls for ``x.shape``.
"""

from __future__ import annotations

from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.modes import set_grad_enabled
from smdistributed.modelparallel.torch.compat.private.tensors import ABOUT_TENSORS

_TENSOR: Any = torch.Tensor


def methods_of_tensors(names: str, *more: Any) -> frozenset[Any]:
    """Returns methods of tensors, and what reads attributes of them.

    Args:
        names: of those, with spaces between; what this version of PyTorch lacks is left out.
        more: functions to return besides.
    """
    found = set(more)
    for name in names.split():
        each = getattr(_TENSOR, name, None)
        if each is not None:
            found.add(each if callable(each) else each.__get__)
    return frozenset(found)


# ---------------------------------------------------------------------- questions about a tensor

#: The question whether a tensor requires a gradient.
REQUIRING_GRADIENT = _TENSOR.requires_grad.__get__
#: Answered by what is known of a tensor but for its values, and leave no trace in a computation.
WITHOUT_VALUES = methods_of_tensors(
    "device layout dtype shape size dim ndim ndimension numel nelement element_size itemsize "
    "nbytes stride is_contiguous is_cuda is_cpu is_xpu is_mps is_meta is_sparse is_quantized "
    "is_mkldnn is_nested is_floating_point is_complex is_signed is_inference is_leaf requires_grad "
    "get_device name __len__",
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
)
#: The same, and what a recording has to see.
ABOUT = WITHOUT_VALUES | methods_of_tensors("grad_fn storage_offset output_nr retains_grad")
#: What concerns the Python object itself.
OF_OBJECTS = methods_of_tensors("__hash__", *ABOUT_TENSORS)
#: What shows numbers to a reader.
SHOWING = methods_of_tensors("__repr__ __format__")
#: What makes lists or arrays of numbers.
MAKING_LISTS = methods_of_tensors("tolist numpy __array__")
#: What gives numbers to Python, or to what is no tensor.
GIVING_VALUES = MAKING_LISTS | methods_of_tensors(
    "item __bool__ __float__ __int__ __index__ __complex__ __format__ __contains__ is_nonzero"
)
#: What gives away memory.
GIVING_MEMORY = methods_of_tensors(
    "data_ptr untyped_storage storage __reduce_ex__ share_memory_ is_shared __dlpack__ "
    "__cuda_array_interface__"
)
#: What leaves no trace in the calls of a recording.
UNRECORDED = WITHOUT_VALUES | {set_grad_enabled}

# ---------------------------------------------------------------------- gradients

#: What runs a backward pass, which gives gradients to leaves.
BACKWARD = frozenset({_TENSOR.backward, torch.autograd.backward})
#: What computes gradients.
DIFFERENTIATING = BACKWARD | {torch.autograd.grad}
#: What puts hooks on gradients.
HOOKING_GRADIENTS = methods_of_tensors("register_hook register_post_accumulate_grad_hook")
#: What gives code to a backward pass, or the nodes of autograd, which take hooks themselves.
GIVING_BACKWARD_CODE = HOOKING_GRADIENTS | methods_of_tensors("grad_fn")
#: What looks at a gradient, which the recording does not have.
READING_GRADIENTS = methods_of_tensors("grad")
#: What decides whether a parameter trains.
SWITCHING_GRADIENTS = methods_of_tensors("requires_grad_", _TENSOR.requires_grad.__set__)

# ---------------------------------------------------------------------- results

#: Give a tensor like another one, whatever its values.
MAKING_LIKE = methods_of_tensors(
    "new_zeros new_ones new_full new_empty new_tensor",
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
    *(torch.rand_like, torch.randn_like, torch.randint_like),
)
#: What gives the tensor itself where there is nothing to convert.
CONVERSIONS = methods_of_tensors("to cpu cuda float double half bfloat16 contiguous")
#: Functions whose result is a part of their first argument; which part, the others say.
SELECTING = frozenset({_TENSOR.__getitem__, _TENSOR.masked_select, torch.masked_select})
#: What changes each number of a tensor by itself, where the other arguments are numbers.
BY_NUMBER = methods_of_tensors(
    "mul_ div_ zero_ detach_ clamp_ clamp_min_ clamp_max_ nan_to_num_ neg_"
)

# ---------------------------------------------------------------------- shapes

#: What lays tensors one over the other, dims from the last on, where those of one number are
#: repeated.
BROADCASTING = methods_of_tensors(
    "add add_ sub sub_ rsub mul mul_ div div_ true_divide pow maximum minimum where masked_fill "
    "masked_fill_ lerp addcmul addcdiv remainder fmod atan2 eq ne lt le gt ge logical_and "
    "logical_or logical_xor bitwise_and bitwise_or bitwise_xor __add__ __radd__ __iadd__ __sub__ "
    "__rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__ __pow__ "
    "__rpow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__",
    *(torch.add, torch.sub, torch.subtract, torch.rsub, torch.mul, torch.multiply, torch.div),
    *(torch.divide, torch.true_divide, torch.pow, torch.maximum, torch.minimum, torch.where),
    *(torch.masked_fill, torch.lerp, torch.addcmul, torch.addcdiv, torch.remainder, torch.fmod),
    *(torch.atan2, torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, torch.logical_and),
    *(torch.logical_or, torch.logical_xor, torch.bitwise_and, torch.bitwise_or, torch.bitwise_xor),
)
#: What does so with all dims but the last two.
MULTIPLYING_MATRICES = methods_of_tensors(
    "matmul __matmul__ __rmatmul__ bmm baddbmm",
    *(torch.matmul, torch.bmm, torch.baddbmm, torch.nn.functional.scaled_dot_product_attention),
)
#: What puts tensors one behind the other, which are alike but along one dim.
CONCATENATING = frozenset({torch.cat, torch.concat, torch.concatenate})
#: What gives the numbers of a tensor other sizes, which follow it.
VIEWING = methods_of_tensors("view reshape", torch.reshape)
#: What makes several dims of one, which follows the tensor, as their sizes do it.
UNFLATTENING = methods_of_tensors("unflatten", torch.unflatten)
#: What repeats dims of one number, by the sizes that follow the tensor.
EXPANDING = methods_of_tensors("expand")


def writes_to_first(function: Any) -> bool:
    """Whether a function writes to its first tensor."""
    name = str(getattr(function, "__name__", ""))
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
