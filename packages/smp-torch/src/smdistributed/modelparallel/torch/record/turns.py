"""Whether the passes of several microbatches may take turns in a module.

In one process a microbatch has its gradients before the next one begins. In a pipeline others run
forward in between, which is another order for a module that keeps state: its backward pass may
change that state, or read it, in tensors that autograd keeps, in hooks, in functions with a
gradient of their own, in what is computed again. So a module that keeps state, or whose backward
pass runs code, is tried out on fakes: forward, backward, forward again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private import (
    hooks_after_accumulation,
    past_function_modes,
)
from smdistributed.modelparallel.torch.record.nested import tensors_in
from smdistributed.modelparallel.torch.record.writes import writes_of

#: Modules whose own statistics count as no state here: autograd keeps them, and does not use them
#: where they change.
_STATISTICS = (nn.modules.batchnorm._NormBase,)
#: Nodes of autograd that keep those, and the names by which they do.
_KEEPING_STATISTICS = "BatchNorm"
_NAMES_OF_STATISTICS = ("_saved_running_mean", "_saved_running_var")
#: Packages whose code knows nothing of the user's modules.
_PACKAGES = {"torch", "numpy", "smdistributed", *sys.stdlib_module_names} - {"__main__"}


def keeps_state(stateful: Mapping[nn.Module, set[str]]) -> bool:
    """Whether a module changes state of which its next pass could see more than statistics.

    Args:
        stateful: the modules in it, with the names of what they change.
    """
    return any(
        not isinstance(module, _STATISTICS) or not names <= module._buffers.keys()
        for module, names in stateful.items()
    )


def is_code_of_others(module: str) -> bool:
    """Whether a function of a Python module may know of the user's modules."""
    return module.partition(".")[0] not in _PACKAGES


def differentiate(module: nn.Module, arguments: Any, result: Any) -> None:
    """Runs the backward pass of a call that was made on fakes."""
    outputs = [each for each in tensors_in(result) if each.requires_grad]
    inputs = [each for each in (*tensors_in(arguments), *module.parameters()) if each.requires_grad]
    if outputs and inputs:
        starts = [torch.ones_like(each) for each in outputs]
        # In this thread, where the modes of fakes and the listener are.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(outputs, inputs, starts, retain_graph=True, allow_unused=True)


class KeptTensors:
    """What autograd keeps of a call for its backward pass.

    Args:
        arguments: of the call.
        result: what it returned.
    """

    def __init__(self, arguments: Any, result: Any) -> None:
        self._tensors = [
            (each, writes_of(each)) for each in _kept(tensors_in(arguments), tensors_in(result))
        ]

    def are_written(self) -> bool:
        """Whether one has been written to since."""
        return any(writes_of(each) != state for each, state in self._tensors)


def _kept(given: list[torch.Tensor], made: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    seen: set[Any] = {each.grad_fn for each in given}
    pending = [each.grad_fn for each in made]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [each for each, _ in node.next_functions]
        is_statistics = _KEEPING_STATISTICS in node.name()
        for name in dir(node):
            if name.startswith("_saved_") and not (is_statistics and name in _NAMES_OF_STATISTICS):
                yield from _read(node, name)
        # A function in Python keeps them itself, or by torch.
        yield from tensors_in(list(getattr(node, "__dict__", {}).values()))
        yield from _read(node, "saved_tensors")


def _read(node: Any, name: str) -> list[torch.Tensor]:
    try:
        return tensors_in(getattr(node, name, None))
    except RuntimeError:  # freed, or changed in place already, which its own backward pass tells
        return []


def has_backward_hooks(leaf: nn.Module) -> bool:
    """Whether a module, or one in it, has hooks of its backward pass."""
    return any(each._backward_hooks or each._backward_pre_hooks for each in leaf.modules())


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """Returns the user's hooks on the gradient of a parameter."""
    with past_function_modes():
        return _of_others((tensor._backward_hooks or {}).values())


def accumulation_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """Returns the user's hooks that run when a gradient has been added to a parameter's."""
    with past_function_modes():
        return _of_others(hooks_after_accumulation(tensor))


def _of_others(hooks: Iterable[Callable[[torch.Tensor], Any]]) -> list[Callable[..., Any]]:
    return [each for each in hooks if is_code_of_others(_module_of(each))]


def _module_of(function: Any) -> str:
    function = getattr(function, "func", function)
    return getattr(function, "__module__", None) or type(function).__module__
