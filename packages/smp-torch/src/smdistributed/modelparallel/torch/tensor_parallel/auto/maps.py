"""The modules that ``auto=True`` has slices of: linear maps, and torch's attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

#: What a class may have of its own that computes what ``nn.Linear`` does.
_OF_ITS_OWN = frozenset(
    {
        *("forward", "__module__", "__doc__", "__qualname__", "__annotations__"),
        *("__firstlineno__", "__static_attributes__"),
    }
)
#: It is tried with numbers of these sizes.
_TRIED = (1.0, 8.0, 100.0)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is a ``Conv1D`` of Transformers: a linear map whose weight is (in, out)."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def is_linear(module: nn.Module) -> bool:
    """Whether a module computes what ``nn.Linear`` does; some subclasses of it do."""
    kind: Any = type(module)
    return kind is nn.Linear or _computes_linear(kind)


def is_map(module: nn.Module) -> bool:
    """Whether a module is a linear map."""
    return is_linear(module) or is_transposed(module)


def is_attention(module: nn.Module) -> bool:
    """Whether a module is torch's attention, which reads its weights by itself."""
    return type(module) is nn.MultiheadAttention


def number_of_maps(module: nn.Module) -> int:
    """Returns how many linear maps a module has in it; an attention counts as two."""
    return sum(is_map(each) + 2 * is_attention(each) for each in module.modules())


def sizes_of(linear: Any) -> tuple[int, int]:
    """Returns how many channels a linear map takes, and how many it gives."""
    outputs, inputs = linear.weight.shape
    return (outputs, inputs) if is_transposed(linear) else (inputs, outputs)


@functools.cache
def _computes_linear(kind: Any) -> bool:
    """Whether a class has nothing but a forward of its own, which gives what that of Linear does.

    It is tried in double precision, forward and backward, with a bias and without one.
    """
    is_torch = kind.__module__.startswith("torch.")
    if is_torch or kind.__bases__ != (nn.Linear,) or not _OF_ITS_OWN.issuperset(vars(kind)):
        return False
    try:
        return all(_gives_linear(kind, bias, size) for bias in (True, False) for size in _TRIED)
    except Exception:  # any code may run here
        return False


def _gives_linear(kind: Any, bias: bool, size: float) -> bool:
    draws = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=draws, dtype=torch.float64, device="cpu") * size
        return made.requires_grad_()

    with torch.enable_grad():
        x, by = drawn(2, 3, 5), drawn(2, 3, 7).detach()
        module: Any = nn.utils.skip_init(  # type: ignore[no-untyped-call]
            kind, 5, 7, bias=bias, dtype=torch.float64, device="cpu"
        )
        given = [x, nn.Parameter(drawn(7, 5).detach())]
        module.weight = given[1]
        if bias:
            module.bias = nn.Parameter(drawn(7).detach())
            given.append(module.bias)
        own, wanted = module(x), F.linear(x, module.weight, module.bias)
        pairs = [
            (own, wanted),
            *zip(
                torch.autograd.grad(own, given, by),
                torch.autograd.grad(wanted, given, by),
                strict=True,
            ),
        ]
    return all(torch.allclose(*pair, rtol=1e-12, atol=1e-12 * size**2) for pair in pairs)
