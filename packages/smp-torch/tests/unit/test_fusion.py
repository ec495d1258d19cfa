"""Functions that are compiled on GPUs: what they compute, and what happens without a compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from smdistributed.modelparallel.torch.compat.private import fusion
from smdistributed.modelparallel.torch.nn import fused

SHAPE = (2, 3, 8)


def given(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def plain_norm(summed: Any, bias: Any, hidden: Any, weight: Any, shift: Any, epsilon: float) -> Any:
    total = summed + bias + hidden
    return total, F.layer_norm(total, (8,), weight, shift, epsilon)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[Any], Any]] = {
    "gelu": (fused.bias_gelu, lambda a, b, c: F.gelu(a + b), [SHAPE, (8,)], "none"),
    "tanh": (
        fused.bias_gelu,
        lambda a, b, c: F.gelu(a + b, approximate="tanh"),
        [SHAPE, (8,)],
        "tanh",
    ),
    "residual": (fused.bias_residual, lambda a, b, c: a + b + c, [SHAPE, (8,), SHAPE], None),
    "norm": (fused.bias_residual_norm, plain_norm, [SHAPE, (8,), SHAPE, (8,), (8,)], 1e-5),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_functions_compute_what_they_say(name: str, is_compiled: bool) -> None:
    function, plain, shapes, constant = CASES[name]
    constants = [] if constant is None else [constant]
    if is_compiled:
        function = fusion._compiled(function.__wrapped__, backend="aot_eager")  # type: ignore[attr-defined]
    results = []
    for each in (function, plain):
        tensors = given(*shapes)
        made = each(*tensors, *constants)
        total = sum(part.square().sum() for part in (made if isinstance(made, tuple) else [made]))
        total.backward(retain_graph=True)
        total.backward()
        results.append([total, *(tensor.grad for tensor in tensors)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a compiler may work")
def test_the_log_says_why_nothing_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not fusion.can_compile.__wrapped__()
    assert "run one by one, since PyTorch's compiler does not work here: " in caplog.text
