"""A tensor whose values are on other ranks: between two steps a script computes with it as usual.

A parameter of another partition stays the object that the script knows, with its own shape. What is
computed with it is absent too, and what is written to it is written on the rank that has it, where
the same script runs (``absence.following``). It has no memory: what comes past functions of torch
is known too (``compat.private.below``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.absence.given import GivenData
from smdistributed.modelparallel.torch.absence.notes import REMEDY, Origin, Source
from smdistributed.modelparallel.torch.absence.values import Question
from smdistributed.modelparallel.torch.compat.private.below import (
    operated_by,
    past_operations,
    without_memory,
)
from smdistributed.modelparallel.torch.compat.private.compiled import run_as_written
from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensorMode,
    inside_transform,
    is_wrapped,
    past_subclass_functions,
    past_transforms,
    pytree,
)
from smdistributed.modelparallel.torch.compat.private.tensors import version_of

#: Size, stride and offset in the memory of another tensor.
Place = tuple[Sequence[int], Sequence[int], int]
_TENSOR: Any = torch.Tensor
_GRAD: Any = _TENSOR.grad.__get__


class Keeper(Protocol):
    """Who knows which rank has what.

    Attributes:
        fake_mode: of all fakes.
        given: what was given to parameters as their data.
    """

    fake_mode: FakeTensorMode
    given: GivenData

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function of torch that got an absent tensor; see ``absence.following``."""

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter, a buffer or a gradient that this rank has."""

    def check_use(self, names: str, what: str) -> None:
        """Raises where nothing may be computed with absent tensors.

        Raises:
            UnsupportedError: it is inside a step.
        """

    def sharing_memory(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Returns a tensor and those that share its memory; None if some cannot be found."""

    def answer(self, question: Question) -> torch.Tensor:
        """Returns what an absent tensor is, which the ranks of the pipeline compute together.

        Raises:
            UnsupportedError: they cannot.
        """


@dataclass
class Absent:
    """What is known of an absent tensor.

    Attributes:
        keeper: knows where values are.
        fake: has its shape, type, device and versions.
        origin: which ranks have what it depends on.
        source: of its values.
        version: of the fake when the source was noted.
        awaits_gradient: of a parameter: it has a gradient, which nobody has asked for yet.
        sees_own: whether it sees the memory of a model's own tensor, all of it (``.data``).
    """

    keeper: Keeper
    fake: torch.Tensor
    origin: Origin
    source: Source
    version: int = 0
    awaits_gradient: bool = False
    sees_own: bool = False

    @property
    def writes_to_own(self) -> bool:
        """Whether what is written to it is written to a model's own tensor, all of it."""
        return self.sees_own or self.source.is_own

    @property
    def names(self) -> frozenset[str]:
        """The names of the parameters that it depends on."""
        return self.origin.names

    @property
    def source_now(self) -> Source:
        """Where the values come from, unless something else has written to them since."""
        if self.source.is_own or self.version == version_of(self.fake):
            return self.source
        return Source()


class AbsentTensor(torch.Tensor):
    """See the module; tensors of a model get this class where they are not."""

    absent: Absent

    @classmethod
    @run_as_written
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Has a function of torch run that got such a tensor."""
        if _Hidden.is_on and func == _GRAD:  # which optimizers ask of each
            return None
        kwargs = kwargs or {}
        if any(hasattr(each, "lying") for each in types):
            return NotImplemented  # first those in parts are brought together
        if inside_transform():  # which has yet to take arguments apart
            with past_subclass_functions():
                return func(*args, **kwargs)
        own = args[0] if args and isinstance(args[0], cls) else absent_in((args, kwargs))[0]
        return own.absent.keeper.run(func, args, kwargs)

    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Has an operation run that came past functions of torch; see ``compat.private.below``.

        Raises:
            UnsupportedError: nobody knows what got it, or a transform of torch.func has yet to run.
        """
        found = absent_in((args, kwargs))
        leaves = pytree.tree_leaves((args, kwargs))
        if not found or any(torch.is_tensor(each) and is_wrapped(each) for each in leaves):
            names = ", ".join(_named(each) for each in found) or "a parameter"
            raise UnsupportedError(
                f"{func} got {names}, which another partition has, by way of its data or of "
                "transforms of torch.func. What is no tensor of the model takes such data by copy_ "
                f"(average.data.copy_(mean), not average.data = mean). {REMEDY}"
            )
        with past_transforms():
            return found[0].absent.keeper.run(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says what it is."""
        names = ", ".join(sorted(self.absent.names)) or "zeros"
        return f"AbsentTensor(shape={tuple(self.shape)}, from {names}, on another partition)"


def absent_in(structure: Any) -> list[AbsentTensor]:
    """Returns the absent tensors in arguments, each once."""
    found = {
        id(each): each for each in pytree.tree_leaves(structure) if isinstance(each, AbsentTensor)
    }
    return list(found.values())


class _Hidden:
    """Whether gradients of absent parameters are not shown: an optimizer would update by them."""

    is_on = False


@contextlib.contextmanager
def gradients_hidden() -> Iterator[None]:
    """Inside, absent parameters have no gradients."""
    before, _Hidden.is_on = _Hidden.is_on, True
    try:
        yield
    finally:
        _Hidden.is_on = before


def hide_gradients(hide: bool) -> None:
    """Switches whether absent parameters have no gradients."""
    _Hidden.is_on = hide


def is_model_type(tensor: torch.Tensor) -> bool:
    """Whether a tensor of a model is of torch's own class, on the rank that has it."""
    return type(tensor) in (AbsentTensor, torch.Tensor, nn.Parameter)


def make_absent(
    tensor: torch.Tensor, keeper: Keeper, origin: Origin, shape: torch.Size, device: torch.device
) -> None:
    """Takes the values of a model's tensor away; it stays the same object."""
    if isinstance(tensor, AbsentTensor) and tensor.absent.source.is_own:
        return
    with keeper.fake_mode:
        fake = torch.empty(shape, dtype=tensor.dtype, device=device)
    is_parameter = isinstance(tensor, nn.Parameter)
    requires_grad = tensor.requires_grad
    with past_subclass_functions():
        tensor.data = vacant(fake, device)
        tensor.__class__ = AbsentTensor
        tensor.requires_grad_(requires_grad)
    own: Any = tensor
    if is_parameter:
        own._is_param = True
    fake.requires_grad_(requires_grad)
    own.absent = Absent(keeper, fake, origin, Source(like=fake))


def make_view_absent(view: torch.Tensor, of: torch.Tensor, place: Place) -> None:
    """Takes the values of a tensor away that saw the memory of a model's, which is absent now."""
    assert isinstance(of, AbsentTensor)
    about = of.absent
    with about.keeper.fake_mode, torch.no_grad():
        fake = about.fake.detach().as_strided(*place)
    origin = about.origin.at(str(place))
    become_absent(view, about.keeper, fake, origin, Source(like=fake))


def become_absent(
    tensor: torch.Tensor, keeper: Keeper, fake: torch.Tensor, origin: Origin, source: Source
) -> None:
    """Takes the values of a tensor away; it stays the same object.

    Args:
        tensor: absent or not.
        keeper: knows where values are.
        fake: has its shape, type, device and versions, and requires a gradient where it does.
        origin: which ranks have what it depends on.
        source: of its values.
    """
    made: Any = tensor
    is_parameter, requires_grad = isinstance(tensor, nn.Parameter), tensor.requires_grad
    fake.requires_grad_(requires_grad)
    with past_subclass_functions():
        tensor.data = vacant(fake, tensor.device)
    made.__class__ = AbsentTensor
    if is_parameter:
        made._is_param = True
    made.absent = Absent(keeper, fake, origin, source, version_of(fake))


def make_present(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Gives a tensor values; it stays the same object."""
    if isinstance(tensor, AbsentTensor):
        own: Any = tensor
        del own.absent
        own.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else torch.Tensor
    tensor.data = values


def is_vacant(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory: ``data`` can be assigned past all functions."""
    return operated_by(tensor) is AbsentTensor


def vacant(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns data of a tensor's shape that no kernel can read."""
    return _vacant(like.shape, like.dtype, device)


#: Tensors of one form share it.
_vacant = functools.lru_cache(maxsize=1024)(
    functools.partial(without_memory, operated=AbsentTensor)
)


def _absent_like(fake: torch.Tensor, device: torch.device) -> AbsentTensor:
    made = torch.empty(0, dtype=fake.dtype, device=device).as_subclass(AbsentTensor)
    with past_subclass_functions(), past_operations():
        made.data = vacant(fake, device)
    return made


def note_gradient(parameter: torch.Tensor) -> None:
    """Gives an absent parameter the gradient that it has on another rank."""
    assert isinstance(parameter, AbsentTensor)
    if parameter.absent.fake.requires_grad:  # a plan may be older than that it was frozen
        parameter.absent.awaits_gradient = True


def renew(parameter: AbsentTensor, origin: Origin) -> None:
    """Takes note that a parameter, and its gradient, have other values after a step."""
    parameter.absent.origin = origin
    with past_subclass_functions():
        gradient = parameter.grad
    if isinstance(gradient, AbsentTensor):
        gradient.absent.origin = origin.of_gradient()


def gradient_of(parameter: AbsentTensor) -> torch.Tensor | None:
    """Returns the gradient of an absent parameter, which is made when it is first asked for.

    Most are cleared unseen. To be called with functions of subclasses switched off.
    """
    if parameter.absent.awaits_gradient:
        parameter.absent.awaits_gradient = False
        if parameter.grad is None:
            parameter.grad = new_gradient(parameter)
    return parameter.grad


def clear_gradient(parameter: AbsentTensor) -> None:
    """Takes the gradient of an absent parameter away."""
    parameter.absent.awaits_gradient = False
    with past_subclass_functions():
        parameter.grad = None


def _named(tensor: AbsentTensor) -> str:
    return ", ".join(sorted(tensor.absent.names))


def new_absent(keeper: Keeper, fake: torch.Tensor, origin: Origin, source: Source) -> AbsentTensor:
    """Returns an absent tensor that looks like a fake."""
    made = _absent_like(fake, fake.device)
    made.absent = Absent(keeper, fake, origin, source, version_of(fake))
    return made


def as_gradient(tensor: AbsentTensor, parameter: AbsentTensor) -> AbsentTensor:
    """Returns an absent tensor that a script makes the gradient of an absent parameter."""
    about = tensor.absent
    about.origin = parameter.absent.origin.of_gradient()
    about.source = Source(like=about.fake)
    return tensor


def new_gradient(parameter: AbsentTensor) -> AbsentTensor:
    """Returns what stands for the gradient of an absent parameter."""
    about = parameter.absent
    with about.keeper.fake_mode:
        fake = torch.empty_like(about.fake, requires_grad=False)
    made = _absent_like(fake, parameter.device)
    origin = about.origin.of_gradient()
    made.absent = Absent(about.keeper, fake, origin, Source(like=fake), version_of(fake))
    return made
