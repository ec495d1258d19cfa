"""Whether the passes of several microbatches may take turns in a module.

In one process a microbatch has its gradients before the next one begins. In a pipeline others run
forward in between, which is another order for a module that keeps state: its backward pass may
change that state, or read it, in tensors that autograd keeps, in hooks, in functions with a
gradient of their own, in what is computed again. So a module that keeps state, or whose backward
pass runs code, is tried out on fakes: forward, backward, forward again.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import re
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.torch.compat.private.compiled import is_made_by_torch
from smdistributed.modelparallel.torch.tensors.nested import tensors_in
from smdistributed.modelparallel.torch.tensors.writes import writes_of

#: Modules whose own statistics count as no state here: autograd keeps them, and does not use them
#: where they change.
_STATISTICS = (nn.modules.batchnorm._NormBase,)
#: Nodes of autograd that keep those, and the names by which they do.
_KEEPING_STATISTICS = "BatchNorm"
_NAMES_OF_STATISTICS = ("_saved_running_mean", "_saved_running_var")
#: Packages whose code knows nothing of the user's modules: ours, torch's and the standard library.
_PACKAGES = {"torch", "numpy", "mpmath", "smdistributed", *sys.stdlib_module_names} - {"__main__"}
#: Of torch.
_COMPILERS = ("torch._inductor", "torch._functorch", "torch._dynamo")
#: Where an import begins.
_IMPORTS = "importlib._bootstrap"


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
    package = module.partition(".")[0]
    return package not in _PACKAGES and package not in _below_torch()


@functools.cache
def _below_torch() -> frozenset[str]:
    """Returns the packages that torch is built on."""
    needed = importlib.metadata.requires("torch") or []
    names = (re.split(r"[^\w.-]", each)[0] for each in needed)
    return frozenset(each.lower().replace("-", "_") for each in names)


def differentiate(module: nn.Module, arguments: Any, result: Any) -> bool:
    """Runs the backward pass of a call that was made on fakes.

    Returns:
        whether it ran code that may know of the user's modules: by whatever way it got there.
    """
    outputs = [each for each in tensors_in(result) if each.requires_grad]
    inputs = [each for each in (*tensors_in(arguments), *module.parameters()) if each.requires_grad]
    if not (outputs and inputs):
        return False
    starts = [torch.ones_like(each) for each in outputs]
    # In this thread, where the modes of fakes, the listener and the profiler are.
    with torch.autograd.set_multithreading_enabled(False), code_of_others_seen() as seen:
        torch.autograd.grad(outputs, inputs, starts, retain_graph=True, allow_unused=True)
    return bool(seen)


@contextlib.contextmanager
def code_of_others_seen() -> Iterator[set[str]]:
    """Yields the Python modules, if they may know of the user's, whose code runs meanwhile.

    What runs at a moment of Python's own choosing is none of them, for it would be seen on one
    rank and not on another: nothing is collected meanwhile, and finders of imports do not count.
    """
    seen: set[str] = set()
    before, collects = sys.getprofile(), gc.isenabled()

    def look(frame: types.FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        module = _module_of(frame)
        if module in seen or not is_code_of_others(module):
            return
        # Torch makes named tuples, whose constructors are in modules of no package, and functions.
        is_made = module.startswith("namedtuple_") or is_made_by_torch(frame.f_code)
        if not is_made and not _is_imported(frame):
            seen.add(module)

    gc.disable()
    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()


def _module_of(frame: types.FrameType) -> str:
    """Returns the name of the Python module that a frame runs code of; "" for code of none.

    Torch's compilers, and what they are built on, make functions of texts, and call them.
    """
    name: str = frame.f_globals.get("__name__", "")
    if not name and frame.f_back is not None:
        caller: str = frame.f_back.f_globals.get("__name__", "")
        is_compiler = caller.startswith(_COMPILERS) or caller.partition(".")[0] in _below_torch()
        return caller if is_compiler else ""
    return name


def _is_imported(frame: types.FrameType | None) -> bool:
    """Whether a frame runs because something is imported, by torch for the first time say."""
    while frame is not None and frame.f_globals.get("__name__") != __name__:
        if frame.f_globals.get("__name__") == _IMPORTS:
            return True
        frame = frame.f_back
    return False


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


def module_of(function: Any) -> str:
    """Returns the name of the Python module that a function is from."""
    function = getattr(function, "func", function)
    return getattr(function, "__module__", None) or type(function).__module__
