"""Small functions over tensors of a GPU, as kernels that PyTorch's compiler makes of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensor,
    without_function_modes,
)

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def in_kernels(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Returns a function that runs compiled where its first argument is on a GPU.

    It is compiled once for all layers that call it with the same shapes, and runs as it is written
    where that is not possible: on a CPU, on fakes, in code that is compiled as a whole, or without
    a working compiler.

    Args:
        function: pure, of tensors and constants.
    """
    compiled: Callable[..., _Result] | None = None

    @functools.wraps(function)
    def run(*args: Any) -> _Result:
        nonlocal compiled
        if not runs_kernels(args[0]):
            return function(*args)
        if compiled is None:
            compiled = _compiled(function)
        # Modes would be compiled too; one that gives tensors a device changes nothing here.
        with without_function_modes(TorchFunctionMode):
            return compiled(*args)

    return run


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Whether code over a tensor can be kernels that are compiled for it here."""
    return (
        tensor.is_cuda
        and not isinstance(tensor, FakeTensor)
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and can_compile()
    )


def _compiled(function: Callable[..., _Result], **options: Any) -> Callable[..., _Result]:
    """Compiles a function that can be differentiated as often as what it stands for."""
    from torch._functorch import config

    # Else a graph that is to be kept for another backward pass is refused: the config of that
    # moment counts, so a context around the compilation does not help.
    config.donated_buffer = False
    return torch.compile(function, **options)


def _probe(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(tensor + 1)


@functools.cache
def can_compile() -> bool:
    """Whether the compiler makes kernels for the GPU of this process; says in the log why not."""
    return works_here(
        # Without a backward pass: autograd's thread of the GPU may be the one that waits for this.
        lambda: _compiled(_probe)(torch.zeros(16, device="cuda")),
        "elementwise operations between exchanges run one by one, since PyTorch's compiler does "
        "not work here",
    )


def works_here(probe: Callable[[], object], otherwise: str) -> bool:
    """Tells whether something that needs Triton works on the GPU of this process.

    The compiler takes seconds to import, and Triton by itself does not: who has kernels of its own
    asks for these.

    Args:
        probe: tries it, on the current device.
        otherwise: what is done in its place, and why, for the log.
    """
    try:
        from torch.utils._triton import has_triton

        if not has_triton():
            raise RuntimeError("Triton is not there")
        # In a thread of its own, where nobody watches what is computed and kept.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(_try, probe, torch.cuda.current_device()).result()
    except Exception as error:  # whatever a compiler raises
        reason = str(error).partition("\n")[0]
        logger.warning("%s: %s: %s", otherwise, type(error).__name__, reason)
        return False
    return True


def _try(probe: Callable[[], object], device: int) -> None:
    with torch.cuda.device(device):
        probe()
