"""What ``model.module`` gives, and what the wrapper around it is not."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.model.absence import WHOLE_MODEL
from smdistributed.modelparallel.torch.precision.casting import cast_inputs


class ModuleShell(nn.Module):
    """The thin wrapper that ``model.module`` gives; unknown attributes are the user's model's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the user's model."""
        return self.module(*args, **kwargs)


class FP16_Module(ModuleShell):  # noqa: N801 - the name that scripts know
    """A model whose tensors were cast to half precision, between ``model.module`` and it.

    Floating-point arguments of a call are cast; what the model returns stays as it is.

    Args:
        module: the model.
        dtype: its type.

    Source: model-parallel-extended-features-pytorch-fp16.md.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the user's model with its arguments in half precision."""
        return self.module(*self.cast(args), **self.cast(kwargs))

    def cast(self, structure: Any) -> Any:
        """Returns arguments in the type of the model."""
        return cast_inputs(structure, self.dtype)


class JobsOwn(nn.Module):
    """A wrapper that belongs to the processes of its job, and is not the model that it wraps.

    It has the parameters, buffers and children of that model under the same names as there,
    whichever way code goes over them: one set of names serves weight-decay groups, what is frozen,
    ``state_dict()`` and checkpoints. ``module`` is no child, or it would be a part of the names.
    """

    module: ModuleShell

    def stand_for(self, model: nn.Module, module: ModuleShell) -> None:
        """Takes the place of ``model``, which ``module`` leads to."""
        self.__dict__["module"] = module
        # The very tables, so what either is given both have. Some walk over these.
        self._parameters, self._buffers = model._parameters, model._buffers
        self._modules = model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set

    def get_module(self) -> nn.Module:
        """Returns the user's own model."""
        raise NotImplementedError

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields name and module of the user's model, and of all modules in it."""
        found: Iterator[tuple[str, nn.Module]]
        found = self.get_module().named_modules(memo, prefix, remove_duplicate)
        return found

    def train(self, mode: bool = True) -> Self:
        """Has the model train, or not."""
        self.training = mode
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Calls a function with every module of the user's model."""
        self.get_module().apply(fn)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self.get_module()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name == "module" or name.startswith("_") or not hasattr(self.module, name):
                raise
            raise AttributeError(
                f"{error}; the model that it wraps has one, model.get_module().{name}. With "
                f"several partitions: {WHOLE_MODEL}"
            ) from None

    @property
    def __deepcopy__(self) -> Callable[[dict[int, Any]], Any]:
        """Copies the model that it wraps: an average, a teacher, the best so far.

        A function of Python's, since what code of this library does with parameters, it does with
        what this rank has of them.

        Raises:
            UnsupportedError: the wrapper casts what the model is given.
        """
        if isinstance(self.module.module, FP16_Module):
            raise UnsupportedError(
                "a DistributedModel with fp16 or bf16 cannot be copied (deepcopy and AveragedModel "
                "do), since the model that it wraps is not cast for its calls. Copy the model "
                "before you wrap it."
            )
        return functools.partial(copy.deepcopy, self.get_module())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled."""
        raise UnsupportedError(
            "a DistributedModel cannot be pickled, since it belongs to the processes of its job: "
            "save state_dict() or smp.save_checkpoint."
        )
