"""Functions that are compiled on GPUs: what they compute, and what happens without a compiler."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.torch.collectives.sums import fused_sum
from smdistributed.modelparallel.torch.compat.private import fusion
from smdistributed.modelparallel.torch.nn import fused
from smdistributed.modelparallel.torch.nn.between_blocks import crossed

SHAPE = (2, 3, 8)


def given(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[Any], Any]] = {
    "gelu": (fused.bias_gelu, lambda a, b, c: F.gelu(a + b), [SHAPE, (8,)], "none"),
    "tanh": (
        fused.bias_gelu,
        lambda a, b, c: F.gelu(a + b, approximate="tanh"),
        [SHAPE, (8,)],
        "tanh",
    ),
    "sum": (fused_sum, lambda a, b, c: a + b + c, [SHAPE, SHAPE, SHAPE], None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_functions_compute_what_they_say(name: str, is_compiled: bool) -> None:
    function, plain, shapes, constant = CASES[name]
    constants = [] if constant is None else [constant]
    if is_compiled:
        function = fusion._compiled(inspect.unwrap(function), backend="aot_eager")  # type: ignore[attr-defined]
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


class Alike:
    """Stands in for a group whose ranks all give what this one does."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.collectives = self

    def handle(self) -> Any:
        return self

    def exchanged(self, result: torch.Tensor) -> torch.Tensor:
        return result

    def gather(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return torch.cat([tensor] * self.size)

    def scatter_parts(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        return list(torch.split(tensor, list(sizes)))


#: Of shares and residual, of the bias, and of the norm.
TYPES = {
    "single": (torch.float32,) * 3,
    "double": (torch.float64,) * 3,
    "bf16": (torch.bfloat16,) * 3,
    "fp16": (torch.float16,) * 3,
    "mixed": (torch.bfloat16, torch.float32, torch.float32),
}


# Compilers warn of much.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("used", ["total everyones", "normed everyones", "normed", "everyones"])
@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("shape", [(2, 3, 8), (3, 2), (70, 48), (33, 1000), (4, 4096), (1, 9000)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_lies_between_blocks_is_one_function(
    shape: tuple[int, ...], types: str, used: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    calls = []
    if device == "cuda":
        from smdistributed.modelparallel.torch.nn import norm_kernel

        real = norm_kernel.gradients
        monkeypatch.setattr(norm_kernel, "gradients", lambda *args: calls.append(1) or real(*args))
    torch.manual_seed(1)
    many, of_bias, of_norm = TYPES[types]
    row = shape[-1]
    norm = nn.LayerNorm(row).to(device, of_norm)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)

    def draw(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=device, dtype=dtype, requires_grad=True)

    share = draw(many, shape[0] * ranks, *shape[1:])
    hidden, bias = draw(many, *shape), draw(of_bias, row)
    group: Any = Alike(ranks)
    made = crossed(
        group, share, [shape[0]] * ranks, bias, hidden, norm, gathers="everyones" in used
    )._asdict()
    inputs = [share, hidden, bias, norm.weight, norm.bias]
    wide = [each.detach().double().requires_grad_() for each in inputs]
    exact = wide[0].unflatten(0, (ranks, -1)).sum(0) + wide[1] + wide[2]
    # What is normed has been rounded.
    total = exact + (made["total"].double() - exact).detach()
    normed = F.layer_norm(total, (row,), wide[3], wide[4], norm.eps)
    want = {"total": total, "normed": normed, "everyones": torch.cat([normed] * ranks)}
    names = used.split()
    given = [torch.randn_like(made[name]) for name in names]
    got = torch.autograd.grad([made[name] for name in names], inputs, given)
    right = torch.autograd.grad(
        [want[name] for name in names], wide, [each.double() for each in given]
    )
    close = {"double": 1e-12, "single": 1e-5}.get(types, 2e-2)
    assert (made["total"].double() - exact).norm() <= close * exact.norm()
    for name in names:
        assert (made[name].double() - want[name]).norm() <= close * want[name].norm(), name
    for mine, other, tensor in zip(got, right, inputs, strict=True):
        assert mine.dtype == tensor.dtype
        size = max(other.norm().item(), tensor.numel() ** 0.5)
        assert (mine.double() - other).norm() <= close * size, (tensor.shape, size)
    assert bool(calls) == (device == "cuda" and types != "double" and row <= 8192)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a compiler may work")
def test_the_log_says_why_nothing_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not fusion.can_compile.__wrapped__()
    assert "run one by one, since PyTorch's compiler does not work here: " in caplog.text
