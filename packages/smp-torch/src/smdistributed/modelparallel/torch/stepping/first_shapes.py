"""Shapes of lazy modules (``nn.LazyLinear``), which their first call gives them.

Every rank has the whole model until the first step, and the batch. So before that step is recorded
its Python runs on fakes, up to the call of the last module that has no shape: each is given its
shape and its first numbers there, drawn from the generators of the script in the order of one
process. All else that this Python has changed is put back, since the step runs it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensorMode,
    past_recording,
    quiet_fakes,
)
from smdistributed.modelparallel.torch.model.distributed import is_made, unmade
from smdistributed.modelparallel.torch.record.fakes import FakeModel
from smdistributed.modelparallel.torch.state.python_random import (
    python_draws,
    python_random_kept,
)
from smdistributed.modelparallel.torch.state.snapshot import Snapshot
from smdistributed.modelparallel.torch.tensors.nested import map_tensors


class _AllMadeError(BaseException):
    """Ends the Python of a step: no module lacks a shape any more."""


def give_shapes(
    fakes: Sequence[FakeModel],
    function: Callable[..., Any],
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    mode: FakeTensorMode,
    device: torch.device,
) -> None:
    """Gives shapes to the modules that have none.

    Args:
        fakes: of the models.
        function: of the user's, which calls them; inside a step.
        calls: its arguments in each microbatch of the first step.
        mode: of the fakes.
        device: of the fakes.

    Raises:
        UnsupportedError: it does not call one of them, or cannot run on fakes so far.
    """
    modules = [module for each in fakes for module in each.names]
    lazy = [module for module in modules if not is_made(module)]
    others = [module for module in modules if module not in set(lazy)]
    unshaped = {id(tensor) for module in lazy for _, _, tensor in _tensors_of(module)}
    before = Snapshot(others, [function], apart_from=lazy, moved=unshaped)
    problem: Exception | None = None

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
            return made.requires_grad_(tensor.requires_grad)

    with contextlib.ExitStack() as stack:
        stack.enter_context(python_random_kept())
        stack.enter_context(_giving(lazy, fakes, fake))
        for each in fakes:
            stack.enter_context(each.in_place())
        stack.enter_context(quiet_fakes())
        stack.enter_context(mode)
        try:
            for call in calls:
                args, kwargs = map_tensors((list(call[0]), dict(call[1])), fake)
                function(*args, **kwargs)
        except _AllMadeError:
            pass
        except SMPError:
            raise
        except Exception as error:
            problem = error
        finally:
            before.note_changes()
            before.put_all_back()
    for each in fakes:
        if (refused := unmade(each.model)) is not None:
            raise refused from problem


@contextlib.contextmanager
def _giving(
    lazy: Sequence[nn.Module],
    fakes: Sequence[FakeModel],
    fake: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[None]:
    """Inside, calls of modules without a shape give them one, past the modes of a recording.

    Args:
        lazy: the modules.
        fakes: of the models, in place.
        fake: makes one.
    """
    hooks: dict[nn.Module, Callable[..., None]] = {}
    made: list[_Place] = []

    def give(module: nn.Module, args: Any, kwargs: Any) -> None:
        with past_recording():
            for each in fakes:
                for (owner, name), real in each.behind.items():
                    if owner is module:
                        _table_of(module, name)[name] = real
            draws = python_draws()
            hooks.pop(module)(module, args, kwargs)
            if draws():
                raise UnsupportedError(
                    f"{type(module).__name__} draws its first numbers from Python's or NumPy's "
                    "generator. Run the model once on an example before smp.DistributedModel."
                )
        for table, name, tensor in _tensors_of(module):
            made.append((table, name, tensor))
            table[name] = fake(tensor)
        if not hooks:
            raise _AllMadeError

    for module in lazy:
        key = _key(module)
        hooks[module] = module._forward_pre_hooks[key]
        module._forward_pre_hooks[key] = give
    try:
        yield
    finally:
        for module, hook in hooks.items():
            module._forward_pre_hooks[_key(module)] = hook
        for table, name, tensor in made:
            table[name] = tensor


def _table_of(module: nn.Module, name: str) -> dict[str, Any]:
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    return next(table for table in tables if name in table)


#: A table of a module, the name of a tensor in it, and the tensor.
_Place = tuple[dict[str, Any], str, torch.Tensor]


def _tensors_of(module: nn.Module) -> Iterator[_Place]:
    for table in (module._parameters, module._buffers):
        for name, tensor in list(table.items()):
            if tensor is not None:
                yield table, name, tensor


def _key(module: nn.Module) -> int:
    """Returns the key of the hook by which a lazy module is given its shape."""
    assert isinstance(module, LazyModuleMixin)
    return int(module._initialize_hook.id)
