"""What a script sees as the gradient of a parameter that is in shards."""

from __future__ import annotations

import functools
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.below import (
    past_operations,
    without_memory,
)
from smdistributed.modelparallel.torch.compat.private.modes import past_subclass_functions
from smdistributed.modelparallel.torch.compat.private.tensors import ABOUT_TENSORS
from smdistributed.modelparallel.torch.sharding.arguments import (
    is_identity,
    leaves_of,
    methods_of_tensors,
    name_of,
)

#: What gives the tensor itself where there is nothing to convert.
CONVERSIONS = methods_of_tensors("to cpu cuda float double half bfloat16 contiguous")
#: What changes numbers one by one, wherever the others are.
_IN_PLACE = methods_of_tensors(
    "mul_ div_ zero_ detach_ clamp_ clamp_min_ clamp_max_ nan_to_num_ neg_ copy_"
)
#: What asks for no values.
_ABOUT = methods_of_tensors(
    "shape dtype device layout is_sparse is_cuda is_leaf requires_grad grad_fn ndim size dim numel "
    "is_floating_point is_complex requires_grad_ __hash__ __len__ is_cpu is_meta",
    *ABOUT_TENSORS,
)


class ShardedGradient(torch.Tensor):
    """What a script sees as the gradient of a sharded parameter: the block of this rank.

    Numbers can be changed one by one, as by ``mul_``; what looks at all of them is refused.
    """

    block: torch.Tensor
    name_of_parameter: str

    @classmethod
    def of(cls, block: torch.Tensor, name: str) -> ShardedGradient:
        """Returns what stands for a gradient.

        Args:
            block: of this rank. It has no part in what the view is given to, but in place.
            name: of the parameter.
        """
        made = block.as_subclass(cls)
        with past_subclass_functions(), past_operations():
            made.data = _vacant(block.shape, block.dtype, block.device)
        made.block, made.name_of_parameter = block, name
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch that got such a gradient."""
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], cls) else None
        with past_subclass_functions():
            if own is not None and func in _ABOUT:
                return func(*args, **kwargs)
            if own is not None and func in _IN_PLACE:
                func(*map(_block_of, args), **{key: _block_of(kwargs[key]) for key in kwargs})
                return own
            if func in CONVERSIONS and is_identity(func, args, kwargs):
                return own
        return cls.operate(func, args, kwargs)

    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Refuses a function or an operation; see ``compat.private.below``.

        Raises:
            UnsupportedError: always.
        """
        found = leaves_of((args, kwargs))
        names = [each.name_of_parameter for each in found if isinstance(each, cls)]
        raise UnsupportedError(
            f"{name_of(func)} asks for the gradient of {', '.join(names) or 'a parameter'}, of "
            "which each rank of the sharding group has a block: take norms by smp.clip_grad_norm_ "
            "or torch.nn.utils.get_total_norm; mul_ and the like change all blocks where every "
            "rank calls them."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says what it is."""
        return f"ShardedGradient({self.name_of_parameter}, block={tuple(self.block.shape)})"


def _block_of(value: Any) -> Any:
    return value.block if isinstance(value, ShardedGradient) else value


#: What has no memory of a shape, which gradients of one shape share.
_vacant = functools.lru_cache(maxsize=1024)(without_memory)
