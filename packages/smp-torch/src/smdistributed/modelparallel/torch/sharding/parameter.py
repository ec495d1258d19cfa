"""A parameter of which this rank has a block, and which is whole only while something uses it.

It stays the object that the script knows, with its whole shape. Every function of torch that gets
it goes through ``__torch_function__``: while the model runs, its unit is gathered first; between
steps it is gathered alone, and may be written to (``parts.at_rest``). What passes by this comes
to ``operate``: in between the parameter has no memory (``compat.private.below``).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.pieces import Rectangle
from smdistributed.modelparallel.torch.absence.tensors import gradients_hidden
from smdistributed.modelparallel.torch.compat.private.below import without_memory
from smdistributed.modelparallel.torch.compat.private.modes import past_subclass_functions
from smdistributed.modelparallel.torch.parts.arguments import is_identity, name_of
from smdistributed.modelparallel.torch.parts.assigning import blocks_of_given
from smdistributed.modelparallel.torch.parts.at_rest import (
    ABOUT_PARTS,
    InParts,
    Lying,
    in_parts,
    run,
    whole_of,
)
from smdistributed.modelparallel.torch.parts.blocks import Blocks, Home
from smdistributed.modelparallel.torch.tensors.functions import CONVERSIONS
from smdistributed.modelparallel.torch.tensors.sparse_rows import of_rows


class ShardsHome(Home, Protocol):
    """Where the units of one model are."""

    is_read_in_blocks: bool

    def enter(self, units: Iterable[int]) -> None:
        """Makes the parameters of units whole; they stay so until ``leave``."""

    def leave(self, units: Iterable[int]) -> None:
        """Lets units go again."""

    def check_use(self, name: str, what: str) -> None:
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

    Attributes:
        blocks: what the values are to a script, which may put others in their place.
    """

    def __init__(
        self,
        name: str,
        shape: torch.Size,
        part: Rectangle,
        values: torch.Tensor,
        home: ShardsHome,
        unit: int,
        place: int,
    ) -> None:
        self.name = name
        self.shape = shape
        self.part = part
        self.values = nn.Parameter(values)
        self.unit = unit
        self.place = place
        self.blocks = Blocks(name, shape, part, self.values, home, (unit, place))
        self.vacant = without_memory(shape, values.dtype, values.device)
        self._wide: torch.Tensor | None = None
        self._seen: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self._square: tuple[int, torch.Tensor] | None = None

    @property
    def home(self) -> ShardsHome:
        """Where the unit of the parameter is."""
        return cast(ShardsHome, self.blocks.home)

    @property
    def is_wide(self) -> bool:
        """Whether sums of gradients have another type than the values."""
        return torch.promote_types(self.values.dtype, torch.float32) != self.values.dtype

    @property
    def _own_gradient(self) -> torch.Tensor | None:
        return self._wide if self.is_wide else self.values.grad

    @property
    def gradient(self) -> torch.Tensor | None:
        """The block of the mean of all gradients, in fp32 at least; None without.

        Where that is the type of the values, it is the gradient of ``values``.
        """
        gradient = self._own_gradient
        if gradient is not None and self._rows is not None and self._seen is not None:
            with torch.no_grad():  # a script may have written to what is another tensor
                gradient.copy_(self.blocks.of_this_rank(self._seen.to_dense()))
            self._seen = None  # who asks may write to the block
        return gradient

    @gradient.setter
    def gradient(self, gradient: torch.Tensor | None) -> None:
        self._seen = None  # it would keep the block alive
        self._square = None
        self._rows = None
        if self.is_wide:
            self._wide = gradient
        else:
            self.values.grad = gradient

    @property
    def rows(self) -> torch.Tensor | None:
        """Which rows of the whole gradient there are, if it is a sparse one. Shape: (rows,)."""
        return self._rows

    @rows.setter
    def rows(self, rows: torch.Tensor | None) -> None:
        self._seen = None
        self._rows = rows

    @property
    def sparse_gradient(self) -> torch.Tensor | None:
        """The block of a sparse gradient, as such; None of another one."""
        gradient = self.gradient
        if gradient is None or self._rows is None:
            return None
        rows = self._rows.view(-1, *[1] * (len(self.shape) - 1)).expand(self.shape)
        own = self.blocks.of_this_rank(rows)
        return of_rows(gradient, own.reshape(len(own), -1).amax(1) if own.numel() else own)

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

    def seen_gradient(self) -> torch.Tensor | None:
        """Returns what a script sees of the gradient: the same object while it is the same.

        A sparse one is gathered for it between steps. Collective then: the sharding group.
        """
        self.forget_square()
        gradient = self._own_gradient
        if gradient is None:
            self._seen = None
            return None
        blocks = self.blocks.like_these(gradient, is_gradient=True)
        seen: Any = self._seen
        if self._rows is None:
            if seen is None or seen.lying.blocks.values is not gradient:
                self._seen = whole_of(blocks)
        elif not self.home.is_at_rest(self.blocks):
            return whole_of(blocks)
        elif seen is None:
            with torch.no_grad(), past_subclass_functions():
                self._seen = of_rows(self.home.gather(blocks), self._rows)
        return self._seen

    def take_gradient(self, tensor: Any) -> None:
        """Has a tensor that a script gives be the gradient. Collective: the sharding group."""
        wide = torch.promote_types(self.values.dtype, torch.float32)
        like = self.blocks.like_these(self.values.new_empty(0, dtype=wide), is_gradient=True)
        self.home.agree(like)
        self.gradient = blocks_of_given(tensor, like, self.values.dtype).values
        self._seen = tensor

    @torch.no_grad()
    def take_values(self, tensor: Any) -> None:
        """Has a tensor that a script gives be the data. Collective: the sharding group.

        What was it before is what it was, for who still sees it.
        """
        self.home.agree(self.blocks)
        blocks, former = blocks_of_given(tensor, self.blocks, self.values.dtype), self.blocks
        if blocks is not former:
            former.values = self.values.detach().clone()
            self.values.copy_(blocks.values)
            blocks.values, self.blocks = self.values, blocks
        self.home.updated()


#: What is told of who wrote to what.
WRITTEN = (
    "{} wrote to {} while the model ran, and what is gathered is only a copy of the ranks' shards: "
    "change parameters by the optimizer, or between steps by DistributedModel.load_state_dict."
)
_NEW_PARAMETER = nn.Parameter.__new__.__code__
_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data
#: What gives a tensor the memory of another one.
_GIVING = (_DATA.__set__, torch.ops.aten.set_.source_Tensor)


class ShardedParameter(nn.Parameter, InParts):
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
        if func in ABOUT_PARTS and not _is_read_in_blocks(args):
            with past_subclass_functions():
                return func(*args, **kwargs)
        if func is torch.Tensor.detach and sys._getframe(1).f_code is _NEW_PARAMETER:
            raise UnsupportedError(
                f"nn.Parameter was given {args[0].shard.name}, which is in shards on the ranks of "
                "a sharding group, and wants a tensor of the same class: give it what clone() "
                "returns, which has all of it."
            )
        return _run(func, args, kwargs)

    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation that came past ``__torch_function__``; see ``compat.private.below``."""
        return _run(func, args, kwargs)

    @property
    def lying(self) -> Lying:
        """How it lies in what the ranks have in blocks: it is the whole."""
        return Lying.all_of(self.shard.blocks)

    def take_data(self, tensor: torch.Tensor) -> None:
        """See ``InParts``."""
        self.shard.take_values(tensor)

    def take_gradient(self, tensor: torch.Tensor | None) -> None:
        """See ``InParts``."""
        if tensor is None:
            self.shard.gradient = None
        else:
            self.shard.take_gradient(tensor)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        """Returns a parameter as any other, with all values. Collective: the sharding group."""
        if id(self) not in memo:
            memo[id(self)] = self._copied()
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Is written as such a parameter."""
        return self._copied().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _copied(self) -> nn.Parameter:
        return nn.Parameter(self.detach().clone(), self.requires_grad)

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
    given = in_parts((args, kwargs))
    parameters = [each for each in given if isinstance(each, ShardedParameter)]
    shards = [each.shard for each in parameters]
    if not parameters:
        return run(func, args, kwargs)  # it came by way of data, which that says
    if all(each.home.is_read_in_blocks for each in shards):
        with past_subclass_functions():
            return func(*_as_blocks(args), **_as_blocks(kwargs))
    is_at_rest = all(each.home.is_at_rest(each.blocks) for each in shards)
    handled, result = _of_one(func, args, kwargs, is_at_rest=is_at_rest)
    if handled:
        return result
    if is_at_rest or len(parameters) < len(given):
        return run(func, args, kwargs)
    for shard in shards:
        shard.home.check_use(shard.name, name_of(func))
    with past_subclass_functions():
        return _run_in_units(func, args, kwargs, parameters)


def _run_in_units(func: Any, args: Any, kwargs: Any, parameters: list[ShardedParameter]) -> Any:
    """Runs a function while the units of parameters are whole."""
    shards = [each.shard for each in parameters]
    versions = [each._version for each in parameters]
    homes = {id(each.home): each.home for each in shards}
    for home in homes.values():
        home.enter([each.unit for each in shards if each.home is home])
    try:
        result = func(*args, **kwargs)
    finally:
        for home in homes.values():
            home.leave([each.unit for each in shards if each.home is home])
    for parameter, version in zip(parameters, versions, strict=True):
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


def sparse_gradient_here(tensor: Any) -> torch.Tensor | None:
    """Returns what is here of the sparse gradient of a parameter in shards, as such."""
    return tensor.shard.sparse_gradient if isinstance(tensor, ShardedParameter) else None


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
def as_blocks(homes: Iterable[ShardsHome]) -> Iterator[None]:
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


def _of_one(func: Any, args: Any, kwargs: Any, *, is_at_rest: bool) -> tuple[bool, Any]:
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
        if args[1] is not shard.seen_gradient():
            _check_rests(is_at_rest, f"the gradient of {shard.name}")
            shard.take_gradient(args[1])
        return True, None
    with past_subclass_functions():
        if func in CONVERSIONS and is_identity(func, args, kwargs):
            return True, own
    if func in _GIVING:
        if args[1] is not own:
            _check_rests(is_at_rest, f".data of {shard.name}")
            shard.take_values(args[1])
        return True, None if func == _DATA.__set__ else own
    if func == _DATA.__get__:
        _check_rests(is_at_rest, f".data of {shard.name}")
    if func == torch.Tensor.register_post_accumulate_grad_hook:
        raise UnsupportedError(
            f"the gradient of {shard.name} goes to the ranks' shards when it has been computed, so "
            "no hook can have it after that: use register_hook, which gets each microbatch's."
        )
    return False, None


def _check_rests(is_at_rest: bool, told: str) -> None:
    if not is_at_rest:
        raise UnsupportedError(
            f"{told} would go past the ranks that hold the parameter in shards, or in slices: "
            "inside of a step read the parameter by detach(), and between steps all ranks may "
            "use .data and .grad of what is no slice of tensor parallelism."
        )


def _as_blocks(structure: Any) -> Any:
    if isinstance(structure, ShardedParameter):
        return structure.shard.values
    if isinstance(structure, dict):
        return {key: _as_blocks(value) for key, value in structure.items()}
    if isinstance(structure, list | tuple) and not isinstance(structure, torch.Size):
        return type(structure)(map(_as_blocks, structure))
    return structure
