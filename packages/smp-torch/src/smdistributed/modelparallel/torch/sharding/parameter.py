"""A parameter of which this rank has a block, and which is whole only while something uses it.

It stays the object that the script knows, with its whole shape. Every function of torch that gets
it goes through ``__torch_function__``: while the model runs, its unit is gathered first; elsewhere
what asks for its values is refused, since one rank alone cannot answer. What passes by this comes
to ``operate``: in between the parameter has no memory (``compat.private.below``).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.common.pieces import Rectangle
from smdistributed.modelparallel.torch.absence.tensors import gradients_hidden
from smdistributed.modelparallel.torch.compat.private.below import without_memory
from smdistributed.modelparallel.torch.compat.private.modes import past_subclass_functions
from smdistributed.modelparallel.torch.compat.private.tensors import ABOUT_TENSORS
from smdistributed.modelparallel.torch.sharding.arguments import (
    is_identity,
    leaves_of,
    methods_of_tensors,
    name_of,
)
from smdistributed.modelparallel.torch.sharding.gradient_view import CONVERSIONS, ShardedGradient


class Home(Protocol):
    """Where the units of one model are."""

    is_read_in_blocks: bool

    def enter(self, shards: Iterable[Shard]) -> None:
        """Makes parameters whole; they stay so until ``leave``."""

    def leave(self, shards: Iterable[Shard]) -> None:
        """Lets parameters go again."""

    def check_use(self, shard: Shard, what: str) -> None:
        """Raises where no values can be had."""


class Shard:
    """What this rank has of a parameter.

    Args:
        name: of the parameter.
        shape: of the whole parameter.
        part: the block.
        values: the numbers in the block.
        home: where the unit of the parameter is.
        unit: number of the unit.
        place: number of the parameter in the unit.
    """

    def __init__(
        self,
        name: str,
        shape: torch.Size,
        part: Rectangle,
        values: torch.Tensor,
        home: Home,
        unit: int,
        place: int,
    ) -> None:
        self.name = name
        self.shape = shape
        self.part = part
        self.values = nn.Parameter(values)
        self._home = weakref.ref(home)  # which has the parameter, too
        self.unit = unit
        self.place = place
        self.vacant = without_memory(shape, values.dtype, values.device)
        self._wide: torch.Tensor | None = None
        self._seen: ShardedGradient | None = None
        self._square: tuple[int, torch.Tensor] | None = None

    @property
    def home(self) -> Home:
        """Where the unit of the parameter is.

        Raises:
            SMPError: its model is gone.
        """
        home = self._home()
        if home is None:
            raise SMPError(
                f"the DistributedModel of parameter {self.name} is gone, and with it the shards "
                "of the other ranks: keep the model as long as its parameters are used."
            )
        return home

    @property
    def is_wide(self) -> bool:
        """Whether sums of gradients have another type than the values."""
        return torch.promote_types(self.values.dtype, torch.float32) != self.values.dtype

    @property
    def gradient(self) -> torch.Tensor | None:
        """The block of the mean of all gradients, in fp32 at least; None without.

        Where that is the type of the values, it is the gradient of ``values``.
        """
        return self._wide if self.is_wide else self.values.grad

    @gradient.setter
    def gradient(self, gradient: torch.Tensor | None) -> None:
        self._seen = None  # it would keep the block alive
        self._square = None
        if self.is_wide:
            self._wide = gradient
        else:
            self.values.grad = gradient

    def know_square(self, square: torch.Tensor) -> None:
        """Takes the sum of the squares of the numbers in the gradient. Shape: scalar.

        It is kept for gradients that nobody but the library has in hand.
        """
        if self._wide is not None:
            self._square = self._wide._version, square

    def forget_square(self) -> None:
        """Knows it no more: somebody may change the gradient in a way that no count shows."""
        self._square = None

    def known_square(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Returns the sum of the squares of a gradient, if it is this one, as it was made."""
        if self._square is None or gradient is not self._wide:
            return None
        version, square = self._square
        return square if version == gradient._version else None

    def seen_gradient(self) -> ShardedGradient | None:
        """Returns what a script sees of the gradient: the same object while it is the same."""
        self.forget_square()
        gradient = self.gradient
        if gradient is None:
            self._seen = None
        elif self._seen is None or self._seen.block is not gradient:
            self._seen = ShardedGradient.of(gradient, self.name)
        return self._seen


#: What is told of who wrote to what.
WRITTEN = (
    "{} wrote to {} while the model ran, and what is gathered is only a copy of the ranks' shards: "
    "change parameters by the optimizer, or between steps by DistributedModel.load_state_dict."
)
#: What asks for no values.
_ABOUT = methods_of_tensors(
    "shape dtype device layout requires_grad is_leaf grad_fn ndim is_cuda is_cpu is_meta is_sparse "
    "is_quantized is_mkldnn is_nested is_xpu is_mps itemsize nbytes name output_nr "
    "retains_grad size dim ndimension numel nelement element_size "
    "is_floating_point is_complex is_signed requires_grad_ register_hook __len__ __hash__ stride "
    "get_device is_inference is_contiguous",
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    *ABOUT_TENSORS,
)
_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data


class ShardedParameter(nn.Parameter):
    """See the module; parameters get this class when they are cut.

    Attributes:
        gathered: their class in compiled modules, which have them whole.
    """

    gathered: ClassVar[type[nn.Parameter]] = nn.Parameter
    shard: Shard

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a function of torch that got such a parameter."""
        kwargs = kwargs or {}
        with past_subclass_functions():
            if func in _ABOUT and not _is_read_in_blocks(args):
                return func(*args, **kwargs)
            return _run(func, args, kwargs)

    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that came past ``__torch_function__``; see ``compat.private.below``."""
        with past_subclass_functions():
            return _run(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says what it is; its values are on several ranks."""
        return f"ShardedParameter({self.shard.name}, shape={tuple(self.shard.shape)})"

    # Compatibility: what scripts read of parameters that are in shards.

    @property
    def ds_shape(self) -> torch.Size:
        """Shape of the whole parameter."""
        return self.shard.shape

    @property
    def ds_numel(self) -> int:
        """Number of elements of the whole parameter."""
        return self.shard.shape.numel()

    @property
    def ds_tensor(self) -> torch.Tensor:
        """The block of this rank; its ``ds_numel`` is the number of its elements."""
        block: Any = self.shard.values.detach()
        block.ds_numel = block.numel()
        return block  # type: ignore[no-any-return]


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Runs a function or an operation with whole parameters, or with blocks for the library."""
    given = {id(each): each for each in _parameters_in((args, kwargs.values()))}
    shards = [each.shard for each in given.values()]
    if all(each.home.is_read_in_blocks for each in shards):
        return func(*_as_blocks(args), **_as_blocks(kwargs))
    handled, result = _of_one(func, args, kwargs)
    if handled:
        return result
    for shard in shards:
        shard.home.check_use(shard, name_of(func))
    versions = [each._version for each in given.values()]
    homes = {id(each.home): each.home for each in shards}
    for home in homes.values():
        home.enter([each for each in shards if each.home is home])
    try:
        result = func(*args, **kwargs)
    finally:
        for home in homes.values():
            home.leave([each for each in shards if each.home is home])
    for parameter, version in zip(given.values(), versions, strict=True):
        if parameter._version != version:
            raise UnsupportedError(WRITTEN.format(name_of(func), parameter.shard.name))
    return result


def held(tensor: Any) -> Any:
    """Returns what is here of a parameter, as a parameter: its block, or itself if it is whole."""
    return tensor.shard.values if isinstance(tensor, ShardedParameter) else tensor


def gradient_here(tensor: Any) -> torch.Tensor | None:
    """Returns what is here of a parameter's gradient: the block, or all of it."""
    if isinstance(tensor, ShardedParameter):
        return tensor.shard.gradient
    with gradients_hidden():
        gradient: torch.Tensor | None = tensor.grad
    return gradient


def known_square(tensor: Any, gradient: torch.Tensor) -> torch.Tensor | None:
    """Returns the sum of the squares of what is here of a gradient, if it is known.

    Args:
        tensor: the parameter.
        gradient: what is about to be used as its gradient.
    """
    is_sharded = isinstance(tensor, ShardedParameter)
    return tensor.shard.known_square(gradient) if is_sharded else None


def forget_square(tensor: Any) -> None:
    """Has the gradient of a parameter normed again: it is in somebody's hand from now on."""
    if isinstance(tensor, ShardedParameter):
        tensor.shard.forget_square()


def block_of(tensor: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Returns of the state of a parameter what belongs to what is here of it."""
    if not isinstance(tensor, ShardedParameter):
        return state
    whole = tensor.shard.shape
    index = tensor.shard.part.within(Rectangle.whole(whole))
    return {
        key: value[index].clone()
        if isinstance(value, torch.Tensor) and value.shape == whole
        else value
        for key, value in state.items()
    }


@contextlib.contextmanager
def as_blocks(homes: Iterable[Home]) -> Iterator[None]:
    """Lets the library read and write parameters: functions of torch get the own blocks."""
    changed = [home for home in homes if not home.is_read_in_blocks]
    for home in changed:
        home.is_read_in_blocks = True
    try:
        yield
    finally:
        for home in changed:
            home.is_read_in_blocks = False


def _is_read_in_blocks(args: Any) -> bool:
    own = args[0] if args else None
    return isinstance(own, ShardedParameter) and own.shard.home.is_read_in_blocks


def _of_one(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Runs what concerns the gradient, the memory or the type of one parameter.

    Returns:
        whether it was that, and the result.
    """
    own = args[0] if args and isinstance(args[0], ShardedParameter) else None
    if own is None:
        return False, None
    shard = own.shard
    if func == _GRAD.__get__:
        return True, shard.seen_gradient()
    if func == _GRAD.__delete__ or (func == _GRAD.__set__ and args[1] is None):
        shard.gradient = None
        return True, None
    if func == _GRAD.__set__:
        if args[1] is shard.seen_gradient():
            return True, None
        raise UnsupportedError(
            f"the gradient of {shard.name} is in blocks on the ranks of a sharding group, and no "
            "whole tensor takes its place: change it in place, as by mul_."
        )
    if func in CONVERSIONS and is_identity(func, args, kwargs):
        return True, own
    if func == _DATA.__set__ and args[1] is own:
        return True, None
    if func in (_DATA.__get__, _DATA.__set__):
        raise UnsupportedError(
            f".data of {shard.name} would go past the ranks that hold the parameter in shards: "
            "read it inside the model by detach(); outside, call state_dict() and "
            "load_state_dict() of the DistributedModel."
        )
    if func == torch.Tensor.register_post_accumulate_grad_hook:
        raise UnsupportedError(
            f"the gradient of {shard.name} goes to the ranks' shards when it has been computed, so "
            "no hook can have it after that: use register_hook, which gets each microbatch's."
        )
    return False, None


def _parameters_in(structure: Any) -> Iterator[ShardedParameter]:
    return (each for each in leaves_of(structure) if isinstance(each, ShardedParameter))


def _as_blocks(structure: Any) -> Any:
    if isinstance(structure, ShardedParameter):
        return structure.shard.values
    if isinstance(structure, dict):
        return {key: _as_blocks(value) for key, value in structure.items()}
    if isinstance(structure, list | tuple) and not isinstance(structure, torch.Size):
        return type(structure)(map(_as_blocks, structure))
    return structure
