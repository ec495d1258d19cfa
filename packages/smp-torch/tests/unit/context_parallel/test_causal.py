"""Causal attention of blocks of queries to the keys up to their ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from smdistributed.modelparallel.torch.context_parallel.causal import causal

#: Of blocks of four, which begin with the first key, in the middle, and before the last.
SIZE, ENDS, KEYS = 4, (4, 12, 20), 20
SPANS = [(end - SIZE, end) for end in ENDS]


def drawn(heads: int = 4, of_keys: int = 4, dtype: Any = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(1)
    shapes = (2, heads, SIZE * len(ENDS), 8), (2, of_keys, KEYS, 8), (2, of_keys, KEYS, 8)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def expected(query: Any, key: Any, value: Any, **options: Any) -> torch.Tensor:
    rows = [torch.ones(SIZE, KEYS, dtype=torch.bool).tril(end - SIZE) for end in ENDS]
    return scaled_dot_product_attention(query, key, value, torch.cat(rows), **options)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("of_keys", [4, 2])
def test_it_is_exact(scale: float | None, of_keys: int) -> None:
    given, wanted = drawn(of_keys=of_keys), drawn(of_keys=of_keys)
    options: Any = {"scale": scale, "enable_gqa": of_keys < 4}
    result, want = causal(*given, SPANS, **options), expected(*wanted, **options)
    assert "_Merged" in result.grad_fn.name()
    torch.testing.assert_close(result, want, rtol=1e-12, atol=1e-12)
    for each in (result, want):
        each.cos().sum().backward()
    for one, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_autocast_is_that_of_attention() -> None:
    given = drawn(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        result = causal(*given, SPANS)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), expected(*given), rtol=0.02, atol=0.02)
    result.sum().backward()
    assert given[0].grad.dtype == torch.float32


def test_other_shapes_run_in_one_call_a_block() -> None:
    given = [each.detach()[0].requires_grad_() for each in drawn()]
    result = causal(*given, SPANS)
    assert "_Merged" not in result.grad_fn.name()
    torch.testing.assert_close(result, expected(*given), rtol=1e-12, atol=1e-12)
