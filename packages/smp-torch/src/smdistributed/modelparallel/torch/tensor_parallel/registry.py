"""Which classes have a distributed version: ``smp.tp_register``.

A registration is kept on the class that it is about. Its constructor then remembers what it was
called with, since that is what the distributed version is made from.

Source: smd_model_parallel_pytorch_tensor_parallel.rst, Registering Tensor Parallelism Distributed
Modules.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule

logger = logging.getLogger(__name__)

#: Arguments by position and by keyword.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Hook = Callable[..., Any]
#: The state of an original -> that of its distributed version, whole tensors by name.
Translation = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]

_ATTRIBUTE = "_smp_registration"
_ARGUMENTS = "_smp_arguments"


@dataclass(frozen=True)
class Registration:
    """How a class is distributed.

    Attributes:
        dist_module: its distributed version.
        init_hook: from the arguments of its constructor to those of ``dist_module``.
        forward_hook: from those of its forward.
        return_hook: from the result of ``dist_module`` to that of its forward.
        arguments_of: tells what a module was made with; None if its constructor remembers.
        translate: takes values over; None if the names and shapes of both are the same.
        translate_back: gives the values in the form of the original; None as ``translate``.
        wrap: returns what is called in place of the forward, from the distributed module and the
            original; None where hooks do that.
        needed: a keyword of the context without which the class stays as it is.
        is_raw: whether nobody has given a module the initial values of its class, so that what
            stands for it draws its own where they do not fit; None: somebody has.
        refusal: tells why a module has to stay whole; None if it need not.
        in_auto: chooses the distributed version for ``auto=True``, from a module and the number of
            ranks; None: it is ``dist_module``.
    """

    dist_module: type[DistributedModule]
    init_hook: Hook | None = None
    forward_hook: Hook | None = None
    return_hook: Hook | None = None
    arguments_of: Callable[[Any], Arguments] | None = None
    translate: Callable[[Any], Translation] | None = None
    translate_back: Callable[[Any], Translation] | None = None
    wrap: Callable[[Any, Any], Callable[..., Any]] | None = None
    needed: str | None = None
    is_raw: Callable[[Any], bool] | None = None
    refusal: Callable[[Any], str | None] | None = None
    in_auto: Callable[[Any, int], type[DistributedModule]] | None = None

    def arguments(self, module: nn.Module) -> Arguments | None:
        """Returns what ``dist_module`` is made with; None if that is not known."""
        if self.arguments_of is not None:
            args, kwargs = self.arguments_of(module)
        elif _ARGUMENTS in vars(module):
            args, kwargs = vars(module)[_ARGUMENTS]
        else:
            return None
        if self.init_hook is not None:
            return hooked("init_hook", self.init_hook, args, kwargs)
        return args, kwargs


def hooked(what: str, hook: Hook, args: Any, kwargs: Any) -> Arguments:
    """Returns the arguments that a hook makes of others.

    Raises:
        TypeError: it returns something else.
    """
    made = hook(*args, **kwargs)
    rule = f"{what} must return (arguments by position, dict of those by keyword)"
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[1], dict):
        raise TypeError(f"{rule}; {hook!r} returned {made!r}.")
    try:
        return tuple(made[0]), made[1]
    except TypeError:
        raise TypeError(f"{rule}; {hook!r} returned {made!r}.") from None


def register(
    module_class: type[nn.Module],
    dist_module: type[DistributedModule],
    init_hook: Hook | None,
    forward_hook: Hook | None,
    return_hook: Hook | None,
) -> None:
    """See ``smp.tp_register_with_module``."""
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise TypeError(f"a torch.nn.Module class is registered; received {module_class!r}.")
    if not (isinstance(dist_module, type) and issubclass(dist_module, DistributedModule)):
        raise TypeError(
            f"dist_module must be a subclass of smp.nn.DistributedModule; received {dist_module!r}."
        )
    _check_signature("init_hook", init_hook, module_class.__init__)
    _check_signature("forward_hook", forward_hook, module_class.forward)
    if return_hook is not None and not callable(return_hook):
        raise TypeError(f"return_hook must be callable; received {return_hook!r}.")
    if _ATTRIBUTE in vars(module_class):
        logger.warning(
            "%s was registered for tensor parallelism before; the last registration counts.",
            module_class.__qualname__,
        )
    else:
        _remember_arguments(module_class)
    registration = Registration(dist_module, init_hook, forward_hook, return_hook)
    # Hooks of the library's own say more than the API has room for.
    completed = getattr(init_hook, "completed", None)
    if completed is not None:
        registration = completed(registration)
    setattr(module_class, _ATTRIBUTE, registration)


def registration_of(module: nn.Module) -> Registration | None:
    """Returns how the user wants a module distributed; subclasses need a registration each."""
    found: Registration | None = vars(type(module)).get(_ATTRIBUTE)
    return found


def _check_signature(what: str, hook: Hook | None, original: Callable[..., Any]) -> None:
    if hook is None:
        return
    if not callable(hook):
        raise TypeError(f"{what} must be callable; received {hook!r}.")
    wanted = list(inspect.signature(original).parameters.values())[1:]  # without self
    given = list(inspect.signature(hook).parameters.values())
    if [_shape(each) for each in wanted] != [_shape(each) for each in given]:
        expected = inspect.Signature([each.replace(annotation=each.empty) for each in wanted])
        received = inspect.Signature([each.replace(annotation=each.empty) for each in given])
        raise TypeError(
            f"{what} must have the signature of the original {original.__qualname__} without "
            f"self, {expected}; received {received}."
        )


def _shape(parameter: inspect.Parameter) -> tuple[object, ...]:
    is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    default = parameter.default
    is_plain = default is None or isinstance(default, int | float | str | bool | type)
    return (
        "" if is_variable else parameter.name,
        parameter.kind,
        default if is_plain else type(default),
    )


def _remember_arguments(module_class: type[nn.Module]) -> None:
    original = module_class.__init__

    @functools.wraps(original)
    def remembering(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is module_class:
            vars(self)[_ARGUMENTS] = args, kwargs

    module_class.__init__ = remembering  # type: ignore[method-assign]
