"""Compiled code in pieces computes what the whole computes, and its gradients can wait."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from smdistributed.modelparallel.torch.compat.private.compiled import (
    backend_of,
    compiled_call,
    uses_cuda_graphs,
)
from smdistributed.modelparallel.torch.execute import compiled_pieces
from smdistributed.modelparallel.torch.execute.compiled_pieces import InPieces, in_pieces
from smdistributed.modelparallel.torch.execute.waiting_layers import putting_off
from smdistributed.modelparallel.torch.execute.weight_gradients import WaitingGradients, put_off_in

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
    return x * block.count.clone()


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


def no_weight(block: Any, x: torch.Tensor) -> torch.Tensor:
    return x


#: What lies between, and how many products are cut out.
CUT = {
    gelu: 2,
    attention: 4,
    a_product_at_once: 3,
    of_addmm: 3,
    parts: 2,
    writes_within_a_piece: 2,
    writes_to_a_buffer: 2,
}
WHOLE = {
    writes_over_a_cut: "changes a tensor in place",
    writes_after_it_was_read: "changes a tensor in place",
    writes_before_an_earlier_level_reads: "changes a tensor in place",
    draws: "draws random numbers",
    autocast: "changes what torch does",
    without_gradients: "changes what torch does",
    checkpointed: "contains graphs of functions",
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
    caplog.set_level(logging.INFO, logger=compiled_pieces.__name__)
    compiled_pieces._tell.cache_clear()
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
    around = in_pieces(block) if compiled else None
    results = []
    with putting_off():
        for x in inputs:
            if around is not None and waits:
                with around:
                    results.append(block(x))
            else:
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


@pytest.mark.parametrize("between", CUT)
@pytest.mark.parametrize("kind", ["eager", "aot_eager"])
def test_pieces_compute_what_the_module_computes(between: Any, kind: str) -> None:
    graphs = Graphs()
    options = {"backend": graphs if kind == "eager" else kind, "fullgraph": True}
    expected, _ = run(made(between), waits=False, compiled=False)
    found, num_waiting = run(made(between, **options), waits=True, compiled=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert num_waiting == 2
    if kind == "eager":
        # Nothing but the products is outside the pieces, and no piece is empty.
        assert all(graphs.sizes)
        assert 0 < len(graphs.sizes) <= CUT[between] + 1


@pytest.mark.parametrize("between", WHOLE)
def test_graphs_that_pieces_would_change_stay_whole(
    between: Any, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = Graphs()
    expected, _ = run(made(between, backend="aot_eager"), waits=False, compiled=True)
    torch.compiler.reset()
    found, num_waiting = run(made(between, backend="aot_eager"), waits=True, compiled=True)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert num_waiting == 0
    (line,) = caplog.messages
    assert WHOLE[between] in line
    assert not graphs.sizes


def test_a_module_without_products_is_compiled_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    graphs = Graphs()

    class Layers(nn.Sequential):  # one of torch's own alone is not worth compiling
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](self[0](x))  # type: ignore[no-any-return]

    module = Layers(nn.Tanh(), nn.LayerNorm(WIDTH))
    module.compile(backend=graphs)
    around = in_pieces(module)
    assert around is not None
    with putting_off(), around:
        module(torch.ones(2, WIDTH, requires_grad=True))
    assert len(graphs.sizes) == 1
    assert not caplog.messages


def test_sizes_that_vary_stay_whole(caplog: pytest.LogCaptureFixture) -> None:
    block = made(gelu, backend="aot_eager", dynamic=True)
    run(block, waits=True, compiled=True)
    assert "has sizes that are not known" in caplog.text


class Adding(nn.Module):
    """Adds to a part of what it is given, before it reads the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, part: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + part.add_(1) + other


@pytest.mark.parametrize("shares", [True, False])
def test_writes_to_shared_memory_stay_whole(shares: bool, caplog: pytest.LogCaptureFixture) -> None:
    graphs = Graphs()
    module = Adding()
    module.compile(backend=graphs)
    around = in_pieces(module)
    assert around is not None
    part = torch.zeros(3, WIDTH)
    with putting_off(), around:
        x = torch.ones(3, WIDTH, requires_grad=True)
        out = module(x, part[:1], part if shares else torch.zeros(3, WIDTH))
    expected = module.linear(x) + 1
    expected[0] += 1 if shares else 0
    torch.testing.assert_close(out, expected)
    assert ("share memory" in caplog.text) is shares


def test_what_no_gradient_waits_for_is_compiled_whole() -> None:
    graphs = Graphs()
    block = made(gelu, backend=graphs)
    around = in_pieces(block)
    assert around is not None
    with around:
        block(torch.ones(2, 3, WIDTH))
    assert len(graphs.sizes) == 1


def test_the_stance_that_a_user_chose_stays() -> None:
    graphs = Graphs()
    block = made(gelu, backend=graphs)
    around = in_pieces(block)
    assert around is not None
    with torch.compiler.set_stance("force_eager"), putting_off(), around:
        block(torch.ones(2, 3, WIDTH))
    assert not graphs.sizes


def test_blocks_share_what_was_compiled_for_one() -> None:
    graphs = Graphs()
    for block in [made(gelu, backend=graphs), made(gelu, backend=graphs)]:
        run(block, waits=True, compiled=True)
    assert InPieces(graphs) == InPieces(graphs) != InPieces(Graphs())
    num_graphs = len(graphs.sizes)
    run(made(gelu, backend=graphs), waits=True, compiled=True)
    assert len(graphs.sizes) == num_graphs


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
@pytest.mark.parametrize(("mode", "records"), [("reduce-overhead", True), ("default", False)])
def test_cuda_graphs_are_told_by_the_mode(mode: str, records: bool) -> None:
    call = compiled_call(made(gelu, mode=mode))
    assert uses_cuda_graphs(backend_of(call)) is records


def test_what_was_not_compiled_has_no_pieces() -> None:
    assert in_pieces(made(gelu)) is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
def test_buffers_that_a_compiler_uses_again_do_not_reach_waiting_gradients() -> None:
    """By the compiler of most users, which frees and takes memory as it sees fit."""
    expected, _ = run(made(attention), waits=False, compiled=False, num=3)
    with torch._functorch.config.patch(donated_buffer=True):
        found, num_waiting = run(made(attention, fullgraph=True), waits=True, compiled=True, num=3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert num_waiting == 2
