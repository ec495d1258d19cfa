"""Code that reads slices of parameters as if they were whole is told so.

A distributed module knows that its parameters are slices; the code around it does not. A norm, a
shape or a product of a slice would be silently those of a part. So while a model or a step function
runs, slices have a class of their own: each function of torch that gets one goes through
``__torch_function__``, which refuses all but what a slice and the whole have in common. Code that
is not Python's asks no class, so their data is such that no kernel can read it (``below``), in the
shape of the whole. They stay the same objects. The forward of a distributed module has its
slices as they are, and so have backward passes, in which autograd and hooks of the library use
them, and compilers, which ask what they are before they come to the code that reads them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.pieces import Part
from smdistributed.modelparallel.torch.compat.private.backward import (
    is_in_backward,
    when_backward_ends,
)
from smdistributed.modelparallel.torch.compat.private.below import (
    HIDDEN,
    Scripted,
    is_of_unusable_tensor,
    operated_by,
    without_memory,
)
from smdistributed.modelparallel.torch.compat.private.checkpointing import (
    Around,
    Reentrant,
    checkpointing_replaced,
)
from smdistributed.modelparallel.torch.compat.private.compiled import (
    frame_left_alone,
    is_being_compiled,
    is_compiler_loaded,
    never_compiled,
)
from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensor,
    past_all_modes,
    past_subclass_functions,
    pytree,
    unseen,
)


class SliceSlot(NamedTuple):
    """A parameter of a module that is a slice.

    Attributes:
        module: that has it.
        attribute: in the module.
        name: in the model.
        shape: of the whole.
        parts: of the whole that the ranks of the group have.
    """

    module: nn.Module
    attribute: str
    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class SliceReadError(UnsupportedError):
    """Code reads a slice of a parameter as if it were the whole."""


class SliceGuard:
    """Refuses what reads the slices of one model.

    Args:
        slots: where slices are.
        inside: distributed module -> where they are in it and in the modules in it.

    Attributes:
        call: calls the forward of a distributed module.
        behind: module and attribute -> what a fake stands for while a step is recorded, which code
            may hold.
    """

    def __init__(
        self, slots: Sequence[SliceSlot], inside: Mapping[nn.Module, Sequence[SliceSlot]]
    ) -> None:
        self.slots = slots
        self.inside = inside
        self.call = _call_with_slices
        self.behind: Mapping[tuple[nn.Module, str], torch.Tensor] = {}

        self._refused: SliceReadError | None = None

    def name_of(self, tensor: object) -> str | None:
        """Returns the name of a slice in the model."""
        return next((slot.name for each, slot in self.tensors() if each is tensor), None)

    def tensors(self) -> Iterator[tuple[torch.Tensor, SliceSlot]]:
        """Yields what is there of the slices at present."""
        for slot in self.slots:
            here = slot.module._parameters.get(slot.attribute)
            for each in (here, self.behind.get((slot.module, slot.attribute))):
                if each is not None:
                    yield each, slot

    def note(self, refused: SliceReadError) -> None:
        """Takes note of an error that is raised in code that is not Python's."""
        self._refused = refused

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Inside, the model runs.

        Raises:
            SliceReadError: for what was refused in code that makes errors of another kind of it.
        """
        self.call = frame_left_alone(_call_with_slices)
        guarded = _guard((each, slot.shape) for each, slot in self.tensors())
        _running.append(self)
        self._refused = None
        try:
            yield
        except RuntimeError as error:
            if is_of_unusable_tensor(error) or _WITH_ITS_GRADIENT in str(error):
                raise _refusal("code that asks for its memory", None, None) from error
            if self._refused is None:
                raise
            raise self._refused from error
        finally:
            _running.remove(self)
            _let_go(guarded)


#: In what torch says to compilers that copy a slice with its gradient, whose shape it has not.
_WITH_ITS_GRADIENT = "attempting to assign a gradient of size"
#: Of the models that run at present.
_running: list[SliceGuard] = []


@contextlib.contextmanager
def slices_guarded(guards: Iterable[SliceGuard]) -> Iterator[None]:
    """Inside, models run: what reads their slices is refused."""
    with contextlib.ExitStack() as stack:
        for guard in guards:
            if guard.slots:
                stack.enter_context(guard.on())
        yield


@contextlib.contextmanager
def slices_as_they_are() -> Iterator[None]:
    """Inside, the library itself uses the slices of models that run."""
    found = [each for guard in _running for each in guard.tensors()]
    shapes = {id(each): slot.shape for each, slot in found}
    lifted = _let_go(each for each, _ in found)
    try:
        yield
    finally:
        _guard((each, shapes[id(each)]) for each in lifted)


def lift_in_this_pass() -> None:
    """Has a backward pass that the script itself has started use slices as they are, to its end."""
    if _running:
        stack = contextlib.ExitStack()
        stack.enter_context(slices_as_they_are())
        when_backward_ends(stack.close)


def guarded_when_recomputed() -> contextlib.AbstractContextManager[None]:
    """Has what activation checkpointing computes again, in backward passes, read no slices either.

    What it asks of a slice then must be answered as in the forward pass.
    """

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not (_running and is_in_backward()):
                return function(*args, **kwargs)
            found = ((each, slot.shape) for guard in _running for each, slot in guard.tensors())
            refused = _guard(found)
            try:
                return function(*args, **kwargs)
            finally:
                _let_go(refused)

        return call

    def replace(around: Around, reentrant: Reentrant) -> tuple[Around, Reentrant]:
        return (
            lambda function, *args, **kwargs: around(guarded(function), *args, **kwargs),
            lambda function, *args: reentrant(guarded(function), *args),
        )

    return checkpointing_replaced(replace)


def using_own_slices(
    forward: Callable[..., Any], between_steps: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the forward of a distributed module as one that has its slices as they are.

    Args:
        forward: of the module.
        between_steps: is given it, the module and its arguments where no model runs.
    """

    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _running:
            return _running[-1].call(forward, self, args, kwargs)
        if torch.compiler.is_compiling():  # of a captured pass, which has slices as they are
            return forward(self, *args, **kwargs)
        return between_steps(forward, self, args, kwargs)

    return call


def _call_with_slices(
    forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
) -> Any:
    # One frame: compilers leave it alone, and would take those of functions that it calls.
    lifted = []
    with unseen():
        for guard in _running:
            for slot in guard.inside.get(module, ()):
                tensor: Any = slot.module._parameters.get(slot.attribute)
                kind: Any = type(tensor)
                if issubclass(kind, GuardedSlice):
                    tensor.__class__ = kind.kind
                    data, vacant = vars(tensor).pop(HIDDEN, (None, None))
                    if data is not None:
                        tensor.data = data
                    lifted.append((tensor, kind, vacant))
    try:
        return forward(module, *args, **kwargs)
    except Exception as error:  # whatever torch says of nested tensors
        if not any(torch.is_tensor(each) and each.is_nested for each in (*args, *kwargs.values())):
            raise
        raise UnsupportedError(
            f"a {type(module).__name__} that tensor parallelism has split got a nested tensor, of "
            "which ranks cannot exchange parts: give it a padded one (torch.nested."
            "to_padded_tensor), or keep it whole, by smp.set_tensor_parallelism(module, "
            "enabled=False) before smp.DistributedModel."
        ) from error
    finally:
        with unseen():
            for tensor, kind, vacant in lifted:
                if vacant is not None:
                    # Only of data that may be read: a mode, as one that counts, would ask for it.
                    vars(tensor)[HIDDEN], tensor.data = (tensor.data, vacant), vacant
                tensor.__class__ = kind


def _guard(tensors: Iterable[tuple[torch.Tensor, tuple[int, ...]]]) -> list[torch.Tensor]:
    """Has functions of torch refuse tensors; returns those that were not refused before.

    Args:
        tensors: slices, and the shapes of the whole.
    """
    changed = []
    with past_all_modes(), past_subclass_functions():
        for tensor, shape in tensors:
            kind = type(tensor)
            if issubclass(kind, GuardedSlice):
                continue
            if not tensor.is_meta:  # of one that has yet to come
                vacant = _vacant(shape, tensor.dtype, tensor.device)
                vars(tensor)[HIDDEN], tensor.data = (tensor.data, vacant), vacant
            tensor.__class__ = _guarded(kind)
            changed.append(tensor)
    return changed


def _let_go(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Has functions of torch take tensors as they are; returns those that were refused before."""
    changed = []
    with past_all_modes(), past_subclass_functions():
        for tensor in tensors:
            kind = type(tensor)
            if issubclass(kind, GuardedSlice):
                tensor.__class__ = kind.kind
                data, _ = vars(tensor).pop(HIDDEN, (None, None))
                if data is not None:
                    tensor.data = data
                changed.append(tensor)
    return changed


@functools.cache
def _vacant(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the data of slices while code may not read them, which those of one form share."""
    return without_memory(shape, dtype, device, GuardedSlice)


def _is_slice(obj: object) -> bool:
    """Whether code may not read a tensor, as it is a slice, or the data of one."""
    if isinstance(obj, GuardedSlice):
        return True
    return isinstance(obj, torch.Tensor) and operated_by(obj) is GuardedSlice


def _of(names: str) -> frozenset[Any]:
    """Returns methods of tensors, and what reads attributes of them."""
    found = (getattr(torch.Tensor, name) for name in names.split())
    return frozenset(each if callable(each) else each.__get__ for each in found)


#: What is the same of a slice and of the whole.
_IN_COMMON = _of(
    "dtype device layout requires_grad requires_grad_ ndim dim is_leaf is_floating_point "
    "is_complex is_signed is_cuda is_cpu is_meta is_sparse is_quantized is_nested "
    "element_size itemsize get_device"
) | {
    torch.is_floating_point,
    torch.is_complex,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
}


class GuardedSlice(torch.Tensor):
    """The class of slices, beside their own, while a model runs; see the module."""

    kind: ClassVar[Any]

    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Refuses an operation; see ``compat.private.below``.

        Raises:
            SliceReadError: it is none of a backward pass that the script has started by itself.
        """
        if is_in_backward():
            with slices_as_they_are():
                if not any(map(_is_slice, pytree.tree_leaves((args, kwargs)))):
                    return func(*args, **kwargs)
        refused = _refusal(func, args, kwargs)
        for guard in _running:
            guard.note(refused)
        raise refused

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says what it is."""
        return f"GuardedSlice({_name_of(self)})"


def _guarded(kind: type[torch.Tensor]) -> Any:
    """Returns the class of slices of another class."""
    return _class_of(kind, is_compiler_loaded())


def _run(cls: type[GuardedSlice], func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Runs a function of torch that got a slice."""
    # What records a step reads fakes too, and sees what else code does with them before this.
    is_seen = issubclass(cls, FakeTensor) and not isinstance(func, Scripted)
    if not (is_in_backward() or is_being_compiled() or is_seen):
        refuse_reads(func, (cls,), args, kwargs)
    return cls.kind.__torch_function__(func, (), args, kwargs or {})


@functools.cache
def _class_of(kind: type[torch.Tensor], is_compiler_loaded: bool) -> Any:
    # Only where there is a compiler can it be told what to leave alone.
    inside = {"kind": kind, "__torch_function__": classmethod(never_compiled(_run))}
    gathered = getattr(kind, "gathered", None)
    if gathered is not None:  # of a parameter in shards
        inside["gathered"] = _class_of(gathered, is_compiler_loaded)
    return type(GuardedSlice.__name__, (GuardedSlice, kind), inside)


def _name_of(tensor: object) -> str:
    names = (guard.name_of(tensor) for guard in _running)
    return next((name for name in names if name is not None), "") or _name_by_shape(tensor)


def _name_by_shape(tensor: object) -> str:
    """Returns the names of the slices that a tensor without a class may come from."""
    found = [slot for guard in _running for slot in guard.slots]
    if isinstance(tensor, torch.Tensor):
        found = [slot for slot in found if slot.shape == tensor.shape] or found
    names = list(dict.fromkeys(slot.name for slot in found))
    more = f" or one of {len(names) - _MOST_NAMES} more" * (len(names) > _MOST_NAMES)
    return " or ".join(names[:_MOST_NAMES]) + more or "a parameter"


#: That a message lists.
_MOST_NAMES = 3


def refuse_reads(func: Any, types: Iterable[type], args: Any, kwargs: Any) -> None:
    """Raises if a function of torch reads a slice as if it were the whole parameter.

    Args:
        func: the function.
        types: of its arguments, those that take part in ``__torch_function__``.
        args: by position.
        kwargs: by name.

    Raises:
        SliceReadError: it does.
    """
    if types and any(issubclass(each, GuardedSlice) for each in types) and func not in _IN_COMMON:
        raise _refusal(func, args, kwargs)


def _refusal(func: Any, args: Any, kwargs: Any) -> SliceReadError:
    found = next(_slices_in((args, kwargs)), None)
    what = func
    if not isinstance(func, str):
        what = torch.overrides.resolve_name(func) or getattr(func, "__name__", func)
    name = _name_of(found)
    return SliceReadError(
        f"{what} was given {name} while the model ran, and each tensor-parallel rank has a slice "
        "of that parameter: only the module that has it may use it, others may ask for what slice "
        "and whole have in common (dtype, device, requires_grad, dim()). Keep its module whole, by "
        "smp.set_tensor_parallelism(module, enabled=False) before smp.DistributedModel; a penalty "
        "on parameters can be weight_decay of the optimizer."
    )


def _slices_in(structure: Any) -> Iterator[torch.Tensor]:
    if _is_slice(structure):
        yield structure
    elif isinstance(structure, dict):
        yield from _slices_in(list(structure.values()))
    elif isinstance(structure, list | tuple):
        for each in structure:
            yield from _slices_in(each)
