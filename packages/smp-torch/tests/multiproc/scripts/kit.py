"""What a script is given: models, optimizers and step functions, with the library or without."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

import smdistributed.modelparallel.torch as smp

MICROBATCHES = 2

Script = Callable[["Kit"], None]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A script, and how its numbers are compared.

    Attributes:
        run: the script.
        dtype: of its numbers; double precision tells a rounding from a mistake.
        tolerance: of numbers, of the largest of a tensor.
        draws: its step draws random numbers, which the library makes otherwise than PyTorch: it is
            held against the library with one partition.
        needs: a module that has to be installed.
    """

    run: Script
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-8
    draws: bool = False
    needs: str = ""


#: Name -> script, of the files that were imported.
SCRIPTS: dict[str, Entry] = {}


def script(**options: Any) -> Callable[[Script], Script]:
    """Registers a script by the name of its function."""

    def register(function: Script) -> Script:
        assert function.__name__ not in SCRIPTS
        SCRIPTS[function.__name__] = Entry(function, **options)
        return function

    return register


def single(**options: Any) -> Any:
    """Returns options of a script in single precision, as of one that casts."""
    return script(**{"dtype": torch.float32, "tolerance": 2e-4, **options})


class Kit:
    """What a script uses of the library.

    Args:
        folder: where the script may write, the same for all ranks.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: list[Any] = []
        self.notes: list[Any] = []

    def note(self, *numbers: Any) -> None:
        """Tells numbers, as a script that prints them."""
        for each in numbers:
            mean = each.reduce_mean() if isinstance(each, smp.StepOutput) else each
            self.notes.append(torch.as_tensor(mean).detach().clone())

    def model(self, net: nn.Module) -> Any:
        """Returns what a script calls in its steps."""
        if smp.tp_size() > 1:
            smp.set_tensor_parallelism(net, auto=True)
        self.models.append(smp.DistributedModel(net))
        return self.models[-1]

    def optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """Returns what a script updates by."""
        return smp.DistributedOptimizer(optimizer)

    def step(self, function: Any = None, **options: Any) -> Any:
        """Makes a function one that runs for each microbatch; a decorator, with options or not."""
        return smp.step(**options) if function is None else smp.step(function)

    def is_first(self) -> bool:
        """Whether this process writes files."""
        return smp.rank() == 0

    def barrier(self) -> None:
        """Waits for all processes."""
        smp.barrier()

    def states(self) -> list[dict[str, torch.Tensor]]:
        """Returns parameters and buffers of all models, by the names of plain PyTorch."""
        return [_tensors(model.translation.to_theirs(model.state_dict())) for model in self.models]


class PlainKit(Kit):
    """The same for one process without the library."""

    def model(self, net: nn.Module) -> Any:
        net.__dict__["backward"] = _backward
        self.models.append(net)
        return net

    def optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        return optimizer

    def step(self, function: Any = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(self.step, **options)
        whole = options.get("non_split_inputs", ())

        def run(*args: Any, **kwargs: Any) -> Any:
            found = []
            for number in range(MICROBATCHES):
                named = {
                    name: each if name in whole else _part(each, number)
                    for name, each in kwargs.items()
                }
                found.append(function(*(_part(each, number) for each in args), **named))
            return pytree.tree_map(_joined, found[0], *found[1:])

        return run

    def is_first(self) -> bool:
        return True

    def states(self) -> list[dict[str, torch.Tensor]]:
        return [_tensors(model.state_dict()) for model in self.models]

    def barrier(self) -> None:
        pass


def _backward(tensors: Any, grad_tensors: Any = None, **options: Any) -> None:
    tensors = tensors if isinstance(tensors, list) else [tensors]
    starts = None if grad_tensors is None else [grad_tensors]
    torch.autograd.backward([each / MICROBATCHES for each in tensors], starts, **options)


def _joined(*outputs: Any) -> Any:
    if isinstance(outputs[0], torch.Tensor):
        return smp.StepOutput([each.detach() for each in outputs])
    return outputs[0]


def _part(value: Any, number: int) -> Any:
    """Returns what a microbatch has of an argument."""
    if isinstance(value, torch.Tensor):
        return value.tensor_split(MICROBATCHES)[number] if value.dim() else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **{k: _part(each, number) for k, each in fields.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_part(each, number) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_part(each, number) for each in value)
    if isinstance(value, dict):
        return type(value)((name, _part(each, number)) for name, each in value.items())
    return value.smp_slice(MICROBATCHES, number, 0) if hasattr(value, "smp_slice") else value


def _tensors(state: Any) -> dict[str, torch.Tensor]:
    return {k: each.detach().clone() for k, each in state.items() if torch.is_tensor(each)}


def seed() -> None:
    """Makes all generators begin anew."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
