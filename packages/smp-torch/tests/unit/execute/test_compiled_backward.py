"""Gradients of weights in compiled code wait, and are what they are where they do not."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from smdistributed.modelparallel.torch.compat.private.compiled import (
    around_compiled,
    backend_of,
    compiled_call,
    uses_cuda_graphs,
)
from smdistributed.modelparallel.torch.execute import compiled_backward
from smdistributed.modelparallel.torch.execute.compiled_backward import (
    Differentiating,
    WaitingCalls,
)
from smdistributed.modelparallel.torch.execute.waiting_layers import putting_off
from smdistributed.modelparallel.torch.execute.weight_gradients import WaitingGradients, put_off_in

#: Of what inductor imports.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

WIDTH = 8


class Block(nn.Module):
    """Two layers, and what lies between them."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("count", torch.zeros(WIDTH))
        self.register_buffer("frozen", torch.randn(WIDTH, WIDTH))
        self._between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self._between(self, self.first(self.norm(x))))


# What lies between


def gelu(block: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x) * 2


def attention(block: Any, x: torch.Tensor) -> torch.Tensor:
    query, key, value = (
        each.view(2, -1, 2, WIDTH // 2).transpose(1, 2)
        for each in (block.second(x), block.first(x), x)
    )
    out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.transpose(1, 2).reshape(x.shape)


def a_product_at_once(block: Any, x: torch.Tensor) -> torch.Tensor:
    return block.first(x)  # type: ignore[no-any-return]


def of_addmm(block: Any, x: torch.Tensor) -> torch.Tensor:
    flat = torch.addmm(block.first.bias, x.flatten(0, 1), block.second.weight)
    return flat.view(x.shape).tanh()


def parts(block: Any, x: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([one * other.sigmoid(), other], -1)


def writes_within_a_piece(block: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x += 1
    return x.relu_()


def writes_to_a_buffer(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.count.add_(1)
    return x + block.count.clone()


def writes_over_a_cut(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x.relu_()


def writes_after_it_was_read(block: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    y = functional.linear(x.detach(), block.frozen)
    x.detach().add_(1)
    return x + y


def writes_before_an_earlier_level_reads(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.count.add_(x.detach().sum() * 0 + 1)
    return x + functional.layer_norm(block.count.clone(), (WIDTH,))


def draws(block: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, 0.5)


def autocast(block: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return block.first(x).float()  # type: ignore[no-any-return]


def without_gradients(block: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = block.second(x)
    return x * y


def checkpointed(block: Any, x: torch.Tensor) -> torch.Tensor:
    out = checkpoint(block.first, x, use_reentrant=False)
    assert isinstance(out, torch.Tensor)
    return out


#: What lies between, and how many of the two layers' weights wait for their gradients.
BETWEEN = {
    gelu: 2,
    parts: 2,
    draws: 2,
    writes_within_a_piece: 2,
    writes_to_a_buffer: 2,
    writes_over_a_cut: 2,
    writes_after_it_was_read: 2,
    writes_before_an_earlier_level_reads: 2,
    checkpointed: 2,
    # The gradient of a weight that is used twice is a sum of products.
    a_product_at_once: 2,
    attention: 2,
    of_addmm: 2,
    without_gradients: 2,
    autocast: 2,
}


class Graphs:
    """A backend that keeps what it is given."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.sizes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward


@pytest.fixture(autouse=True)
def _fresh(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, logger=compiled_backward.__name__)
    compiled_backward._tell.cache_clear()
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(block: Block, *, waits: bool, compiled: bool, num: int = 2) -> tuple[list[Any], int]:
    """Runs microbatches forward, then all backward, then the gradients that waited.

    Returns:
        the results, gradients and buffers; how many of the weights had to wait for theirs.
    """
    torch.manual_seed(1)
    inputs = [torch.randn(2, 3, WIDTH, requires_grad=True) for _ in range(num)]
    calls = WaitingCalls([block])
    results = []
    with putting_off():
        for x in inputs:
            with calls.in_place() if compiled and waits else contextlib.nullcontext():
                results.append(block(x))
        all_waiting = []
        for result in results:
            loss = result.square().sum()
            waiting = WaitingGradients([loss])
            with put_off_in(waiting):
                loss.backward()
            all_waiting.append(waiting)
        num_waiting = sum(each.grad is None for each in (block.first.weight, block.second.weight))
        for waiting in all_waiting:
            waiting.compute()
    gradients = [each.grad for each in (*inputs, *block.parameters())]
    return [*results, *gradients, block.count], num_waiting


def made(between: Any, **options: Any) -> Block:
    torch.manual_seed(0)
    block = Block(between)
    if options:
        block.compile(**options)
    return block


@pytest.mark.parametrize("between", BETWEEN)
def test_gradients_that_wait_are_those_that_do_not(between: Any) -> None:
    expected, _ = run(made(between, backend="aot_eager"), waits=False, compiled=False)
    torch.compiler.reset()
    options = {"backend": "aot_eager", "fullgraph": between is not checkpointed}
    found, num_waiting = run(made(between, **options), waits=True, compiled=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert num_waiting == BETWEEN[between]


def test_a_gradient_may_be_the_transpose_of_a_product() -> None:
    found = []
    for waits in (False, True):
        torch.compiler.reset()
        block = made(gelu, backend="aot_eager")
        # Of a weight that lies across, autograd computes the gradient the other way round.
        block.first.weight.data = block.first.weight.data.t().contiguous().t()
        found.append(run(block, waits=waits, compiled=waits)[0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_that_are_looked_at_come_at_once() -> None:
    """Of the compiled pass as of any other: only what nobody looks at may wait."""
    block = made(gelu, backend="aot_eager")
    seen: list[torch.Tensor] = []
    block.first.weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
    found, num_waiting = run(block, waits=True, compiled=True)
    assert num_waiting == 1
    assert len(seen) == 2
    expected, _ = run(made(gelu), waits=False, compiled=False)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_that_user_code_asks_for_come_at_once() -> None:
    block, x = made(gelu, backend="aot_eager"), torch.ones(2, 3, WIDTH, requires_grad=True)
    calls = WaitingCalls([block])
    with putting_off(), calls.in_place():
        out = block(x)
    with put_off_in(WaitingGradients([out.sum()])):  # another pass than the one that asks
        (gradient,) = torch.autograd.grad((out * 2).sum(), [block.first.weight])
    other = made(gelu)
    (expected,) = torch.autograd.grad((other(x) * 2).sum(), [other.first.weight])
    torch.testing.assert_close(gradient, expected)
    assert block.first.weight.grad is None


class Reading(nn.Module):
    """Multiplies a weight with a buffer, to which it may write before the gradient is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("rows", torch.ones(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.rows) + self.other(x)
        return result


def test_what_multiplies_a_buffer_does_not_wait() -> None:
    module, x = Reading(), torch.ones(2, WIDTH, requires_grad=True)
    module.compile(backend="aot_eager")
    calls = WaitingCalls([module])
    with putting_off(), calls.in_place():
        loss = module(x).sum()
    waiting = WaitingGradients([loss])
    with put_off_in(waiting):
        loss.backward()
    assert module.linear.weight.grad is not None
    assert module.other.weight.grad is None
    module.rows.zero_()
    waiting.compute()
    assert torch.equal(module.linear.weight.grad, module.other.weight.grad)


def test_what_the_compiler_does_not_differentiate_does_not_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graphs = Graphs()
    _, num_waiting = run(made(gelu, backend=graphs), waits=True, compiled=True)
    assert num_waiting == 0
    assert len(graphs.sizes) == 1
    assert "is not differentiated by the compiler" in caplog.text


def test_sizes_that_vary_do_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    block = made(gelu, backend="aot_eager", dynamic=True)
    run(block, waits=True, compiled=True)
    assert "has sizes that are not known" in caplog.text


@pytest.mark.parametrize("wraps", [False, True])
def test_outside_the_user_s_own_calls_are_made(wraps: bool) -> None:
    graphs, others = Graphs(), Graphs()
    plain = made(gelu)
    block: Any = plain
    if wraps:
        block = torch.compile(plain, backend=graphs)
    else:
        block.compile(backend=graphs)
    calls, x = WaitingCalls([block]), torch.ones(2, 3, WIDTH)
    for num_graphs in (2, 2):
        with putting_off(), calls.in_place():
            block(x)
        block(x)
        assert len(graphs.sizes) == num_graphs  # one by each compiler
    if not wraps:
        block.compile(backend=others)
        for _ in range(2):
            with putting_off(), calls.in_place():
                block(x)
        assert (len(graphs.sizes), len(others.sizes)) == (2, 1)


def test_what_stands_around_compiled_calls_stays() -> None:
    block = made(gelu, backend="aot_eager")
    calls, seen = WaitingCalls([block]), []
    handles = around_compiled(block, lambda *_: seen.append(1), lambda *_: seen.append(2))
    with putting_off(), calls.in_place():
        block(torch.ones(2, 3, WIDTH))
        handles[0].remove()
        (inner,) = around_compiled(block, lambda *_: seen.append(3), lambda *_: seen.append(4))
        block(torch.ones(2, 3, WIDTH))
    inner.remove()
    assert seen == [1, 2, 3, 4]
    assert not isinstance(backend_of(compiled_call(block)), Differentiating)


def test_the_stance_that_a_user_chose_stays() -> None:
    graphs = Graphs()
    block = made(gelu, backend=graphs)
    calls = WaitingCalls([block])
    with torch.compiler.set_stance("force_eager"), putting_off(), calls.in_place():
        block(torch.ones(2, 3, WIDTH))
    assert not graphs.sizes


def test_blocks_share_what_was_compiled_for_one() -> None:
    graphs = Graphs()
    for block in [made(gelu, backend=graphs), made(gelu, backend=graphs)]:
        run(block, waits=True, compiled=True)
    assert Differentiating(graphs) == Differentiating(graphs) != Differentiating(Graphs())
    num_graphs = len(graphs.sizes)
    run(made(gelu, backend=graphs), waits=True, compiled=True)
    assert len(graphs.sizes) == num_graphs


@pytest.mark.parametrize(("mode", "records"), [("reduce-overhead", True), ("default", False)])
def test_cuda_graphs_are_told_by_the_mode(mode: str, records: bool) -> None:
    call = compiled_call(made(gelu, mode=mode))
    assert uses_cuda_graphs(backend_of(call)) is records


def test_what_was_not_compiled_runs_as_it_is() -> None:
    expected, _ = run(made(gelu), waits=False, compiled=False)
    found, num_waiting = run(made(gelu), waits=True, compiled=True)
    assert all(map(torch.equal, found, expected))
    assert num_waiting == 2


@pytest.mark.slow  # a compiler of C++ prepares PyTorch's headers, and makes a dozen libraries
@pytest.mark.skipif(" " in tempfile.gettempdir(), reason="PyTorch compiles in no path with a space")
def test_buffers_that_a_compiler_uses_again_do_not_reach_waiting_gradients() -> None:
    """By the compiler of most users, which frees and takes memory as it sees fit."""
    expected, _ = run(made(attention), waits=False, compiled=False, num=3)
    with torch._functorch.config.patch(donated_buffer=True):
        found, num_waiting = run(made(attention, fullgraph=True), waits=True, compiled=True, num=3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert num_waiting == 2
