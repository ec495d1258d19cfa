"""Saying which modules are split over the tensor-parallel ranks, and how.

Source: smd_model_parallel_pytorch_tensor_parallel.rst; smd_model_parallel_pytorch.rst, Context
Managers and Util Functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

from smdistributed.modelparallel.torch.api.slot import slot
from smdistributed.modelparallel.torch.model.distributed import models_of
from smdistributed.modelparallel.torch.tensor_parallel import registry
from smdistributed.modelparallel.torch.tensor_parallel.module import DistributedModule

_Class = TypeVar("_Class", bound=type[nn.Module])


@contextlib.contextmanager
def tensor_parallelism(enabled: bool = True, **tensor_parallel_config: Any) -> Iterator[None]:
    """Marks the modules that are created inside for distribution over the tensor-parallel ranks.

    ``DistributedModel`` replaces the outermost marked modules that have a distributed version:
    ``nn.Linear``, models of Transformers that the library knows, and what was registered. Of
    nested contexts the innermost counts. Usable as a decorator too. With one tensor-parallel rank
    it has no effect.

    Args:
        enabled: False leaves the modules whole.
        tensor_parallel_config: arguments for the distributed modules, which win over those that a
            module was made with. What no distributed module takes is logged. Besides, beyond the
            documents, ``auto=True`` splits the attention and feed-forward blocks of any model as
            they are, each proven before use, whole against slices; ``sample_inputs`` says what the
            model can be called with: a dict of keywords, or a tuple of arguments.

    Raises:
        TypeError: ``auto`` is neither True nor False.

    Source: smd_model_parallel_pytorch_tensor_parallel.rst, Enabling Tensor Parallelism.
    """
    with slot.get().tensor_marks.creating(enabled, tensor_parallel_config):
        yield


def set_tensor_parallelism(
    module: nn.Module, enabled: bool = True, **tensor_parallel_config: Any
) -> None:
    """Marks a finished module and all modules below it; see ``tensor_parallelism``.

    Call it on every process, before DistributedModel.

    Raises:
        TypeError: ``module`` is no ``nn.Module``; or ``auto`` is neither True nor False.
        RuntimeError: it belongs to a DistributedModel already.

    Source: smd_model_parallel_pytorch_tensor_parallel.rst, Enabling Tensor Parallelism.
    """
    runtime = slot.get()
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"set_tensor_parallelism takes a torch.nn.Module; received {type(module).__name__}."
        )
    for model in models_of(runtime):
        if module is model or module in model.holder.fakes.names:
            raise RuntimeError(
                "set_tensor_parallelism must come before DistributedModel, which replaces what "
                f"is marked; {type(module).__name__} belongs to one already."
            )
    runtime.tensor_marks.set(module, enabled, tensor_parallel_config)


class tp_register:  # noqa: N801 - a documented name
    """Registers a distributed version of the class that it decorates.

    Call it on every process, before the model is built.

    Args:
        dist_module: a subclass of ``smp.nn.DistributedModule``.
        init_hook: takes what the class's ``__init__`` takes, and returns what that of
            ``dist_module`` gets: an iterable of arguments by position and a dict of those by
            keyword. None passes them through.
        forward_hook: the same for ``forward``.
        return_hook: takes what ``dist_module`` returns, and returns what the class would have.

    Raises:
        TypeError: no such subclass; or a hook has another signature than the original, without
            ``self``.

    Source: smd_model_parallel_pytorch_tensor_parallel.rst, Registering Tensor Parallelism
    Distributed Modules.
    """

    def __init__(
        self,
        dist_module: type[DistributedModule],
        init_hook: Callable[..., Any] | None = None,
        forward_hook: Callable[..., Any] | None = None,
        return_hook: Callable[..., Any] | None = None,
    ) -> None:
        self._registration = dist_module, init_hook, forward_hook, return_hook

    def __call__(self, module_cls: _Class) -> _Class:
        """Registers the class, and returns it."""
        registry.register(module_cls, *self._registration)
        return module_cls


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[DistributedModule],
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[..., Any] | None = None,
) -> None:
    """Registers a distributed version of a class that cannot be edited; see ``tp_register``.

    Args:
        module_cls: the class to distribute; its subclasses stay as they are.
        dist_module, init_hook, forward_hook, return_hook: as in ``tp_register``.

    Raises:
        TypeError: as ``tp_register``; or ``module_cls`` is no class of modules.

    Source: smd_model_parallel_pytorch_tensor_parallel.rst, Registering Tensor Parallelism
    Distributed Modules.
    """
    registry.register(module_cls, dist_module, init_hook, forward_hook, return_hook)


def hvd_average_grads() -> None:
    """Compatibility: nothing is left to do, a step function returns averaged gradients."""
    slot.get()
