"""Compiled modules: they run compiled, the numbers stay, and nothing is compiled again.

The backend runs each graph as it is and counts them: what is tested is what becomes one graph,
not what a compiler makes of it. All is compiled with ``fullgraph``: a break is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from world import generator, quick, run, world_of

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import ConfigError, SMPError, UnsupportedError
from smdistributed.modelparallel.common.testing import World, Worlds
from smdistributed.modelparallel.torch.sharding.parameter import ShardedParameter

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

WIDTH = 8
STEPS = 3


def world(ranks: int, **config: Any) -> World:
    return world_of(ranks, {"microbatches": 2, **config})


SHARDED = {"ddp": True, "sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 2}
WORLDS = {
    "one": world(1, pipeline_parallel_degree=1),
    "pp2": world(2, pipeline_parallel_degree=2, pipeline="interleaved"),
    "halves": world(2, pipeline_parallel_degree=2, pipeline="zero_bubble"),
    "shards": world(2, **SHARDED),
    "pp2-shards": world(4, pipeline_parallel_degree=2, pipeline="zero_bubble", **SHARDED),
}


class Mlp(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.relu(self.linear(x)))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Graphs:
    """A backend that counts what it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


def each_block(net: Net, options: dict[str, Any]) -> nn.Module:
    for block in net.blocks:
        block.compile(**options)
    return net


def each_block_wrapped(net: Net, options: dict[str, Any]) -> nn.Module:
    net.blocks = nn.ModuleList(torch.compile(block, **options) for block in net.blocks)
    return net


def whole(net: Net, options: dict[str, Any]) -> nn.Module:
    net.compile(**options)
    return net


def whole_wrapped(net: Net, options: dict[str, Any]) -> nn.Module:
    return torch.compile(net, **options)


def part_of_each_block(net: Net, options: dict[str, Any]) -> nn.Module:
    for block in net.blocks:
        block.mlp.compile(**options)
    return net


def nothing(net: Any, options: dict[str, Any]) -> Any:
    return net


def distributed(net: Any, options: dict[str, Any]) -> Any:
    net.compile(**options)
    return net


def distributed_wrapped(net: Any, options: dict[str, Any]) -> Any:
    compiled = torch.compile(net, **options)
    assert compiled is net
    return net


def its_blocks(net: Any, options: dict[str, Any]) -> Any:
    each_block(net.get_module(), options)
    return net


#: How a model is compiled: before it is distributed, after that, after the second step.
WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "each_block": (each_block, nothing, nothing),
    "each_block_wrapped": (each_block_wrapped, nothing, nothing),
    "part_of_each_block": (part_of_each_block, nothing, nothing),
    "whole": (whole, nothing, nothing),
    "whole_wrapped": (whole_wrapped, nothing, nothing),
    "distributed": (nothing, distributed, nothing),
    "distributed_wrapped": (nothing, distributed_wrapped, nothing),
    "late_blocks": (nothing, nothing, its_blocks),
    "late_whole": (nothing, nothing, distributed),
}


def train(way: str | None, dropout: float, checkpointing: bool, backend: Any = None) -> Any:
    """Trains a model that is compiled in one of the ways, or not at all, and then evaluates it.

    Returns:
        the losses, and how many graphs there were after each.
    """
    torch.compiler.reset()
    graphs = Graphs()
    # To repeat what a graph draws takes a backend that knows of gradients.
    backend = backend or ("aot_eager" if checkpointing else graphs)
    options = {"backend": backend, "fullgraph": True}
    before, after, late = WAYS[way] if way is not None else (nothing, nothing, nothing)
    torch.manual_seed(0)
    net = Net(dropout)
    model = smp.DistributedModel(before(net, options))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    model = after(model, options)
    if checkpointing:
        for block in net.blocks:
            smp.set_activation_checkpointing(block)

    @smp.step
    def step(x: torch.Tensor, y: torch.Tensor, learns: bool) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        if learns:
            model.backward(loss)
        return loss

    numbers = generator(1)
    losses, counts = [], []
    for position in range(STEPS + 1):
        learns = position < STEPS
        model.train(learns)
        if position == 2:
            model = late(model, options)
        x = torch.randn(4, WIDTH, generator=numbers)
        y = torch.randint(3, (4,), generator=numbers)
        optimizer.zero_grad()
        losses.append(step(x, y, learns).reduce_mean().item())
        if learns:
            optimizer.step()
        counts.append(graphs.count)
    return losses, counts


def train_all(ways: list[str | None], dropout: float, checkpointing: bool = False) -> Any:
    return {way: train(way, dropout, checkpointing) for way in ways}


@pytest.mark.parametrize(
    ("world", "ways"),
    [
        # Every way in halves, which are a pipeline, and those that differ in shards.
        ("halves", list(WAYS)),
        ("shards", ["each_block_wrapped", "whole", "distributed", "late_blocks"]),
        *(
            pytest.param(world, list(WAYS), marks=pytest.mark.slow)
            for world in ("one", "pp2", "shards", "pp2-shards")
        ),
    ],
)
def test_what_was_compiled_runs_compiled(worlds: Worlds, world: str, ways: list[str]) -> None:
    for rank in run(worlds, WORLDS[world], train_all, [None, *ways], 0.0):
        expected, none = rank.pop(None)
        assert set(none) == {0}
        for way, (losses, counts) in rank.items():
            assert losses == expected, way
            first = 2 if way.startswith("late") else 0
            assert set(counts[:first]) <= {0}, way
            # Graphs for training, of which none is new after the first step; others to evaluate.
            assert 0 < counts[first] == counts[STEPS - 1] < counts[STEPS], (way, counts)


def train_between(options: Any, kind: str) -> tuple[list[float], int]:
    """Trains a model whose loss and sums between modules are compiled, or nothing is.

    Returns:
        the losses, and how many graphs there were.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    graphs = Graphs()
    net = Net(0.5)
    if kind == "with blocks":
        each_block(net, {"backend": graphs, "fullgraph": True})
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))

    @smp.step(compile=options and {"backend": graphs})
    def step(x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
        scores = model(x).float() * factor
        loss = nn.functional.cross_entropy(scores, y)
        if kind == "in place":
            loss += scores.square().mean().sqrt()
        model.backward(loss)
        return loss

    numbers, losses = generator(1), []
    for position in range(STEPS):
        x = torch.randn(4, WIDTH, generator=numbers)
        y = torch.randint(3, (4,), generator=numbers)
        optimizer.zero_grad()
        factor = 1.0 + position if kind == "numbers" else 1.0
        losses.append(step(x, y, factor).reduce_mean().item())
        optimizer.step()
    return losses, graphs.count


def compare_between(kind: str) -> tuple[bool, int, int]:
    (plain, blocks), (losses, count) = (train_between(each, kind) for each in (False, True))
    return losses == plain, blocks, count


@pytest.mark.parametrize("kind", ["plain", "with blocks", "numbers", "in place"])
@pytest.mark.parametrize("world", quick(["pp2", "halves"], ["halves"]))
def test_what_lies_between_modules_is_compiled(worlds: Worlds, world: str, kind: str) -> None:
    first, last = run(worlds, WORLDS[world], compare_between, kind)
    assert first[0]
    assert last[0]
    # The loss is where the last module is; the microbatches and steps share what is compiled.
    assert last[2] - last[1] == (STEPS if kind == "numbers" else 1)
    assert first[2] == first[1]


def test_options_of_the_compiler_are_checked() -> None:
    with pytest.raises(ConfigError, match="received bakend: choose of backend"):
        smp.step(compile={"bakend": "eager"})
    with pytest.raises(ConfigError, match="received 'inductor'"):
        smp.step(compile="inductor")


def test_masks_of_compiled_blocks_do_not_depend_on_the_partition(worlds: Worlds) -> None:
    for checkpointing, ways in ((False, ["part_of_each_block"]), (True, ["each_block"])):
        (one,) = run(worlds, WORLDS["one"], train_all, ways, 0.5, checkpointing)
        for rank in run(worlds, WORLDS["pp2"], train_all, ways, 0.5, checkpointing):
            for way in ways:
                assert rank[way][0] == pytest.approx(one[way][0], rel=1e-6), way


def test_compiled_code_keeps_no_gathered_parameters(worlds: Worlds) -> None:
    """By a compiler that makes backward passes, which get parameters where they are by then."""
    for rank in run(worlds, WORLDS["shards"], train_all, [None, "each_block"], 0.0, True):
        assert rank["each_block"][0] == pytest.approx(rank[None][0], rel=1e-6)
    for compiled, plain in run(worlds, WORLDS["shards"], losses_without_what_was_gathered):
        assert compiled == pytest.approx(plain, rel=1e-6)
        assert plain[1] != plain[0]


def losses_without_what_was_gathered() -> list[list[float]]:
    """Trains with and without compiled blocks; between the passes what was gathered is spoiled."""
    return [spoiled(way) for way in (each_block, nothing)]


def spoiled(way: Callable[..., Any]) -> list[float]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = smp.DistributedModel(way(Net(0.0), {"backend": "aot_eager", "fullgraph": True}))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    home = model.data_parallel.shards.model

    @smp.step(cuda_graphs=False)  # what it empties a recording has not
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        gathered = [unit.memory for unit in home.units if unit.memory is not None]
        assert gathered
        home.residency.empty()
        for memory in gathered:
            memory.fill_(float("nan"))
        model.backward(loss)
        return loss

    losses = []
    for _ in range(2):
        losses.append(step(torch.ones(4, WIDTH)).reduce_mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs gather without each other")
def test_parameters_are_in_shards_again_after_errors(worlds: Worlds) -> None:
    for compiled, plain in run(worlds, WORLDS["shards"], losses_around_errors):
        assert compiled == pytest.approx(plain, rel=1e-6)


def losses_around_errors() -> list[list[float]]:
    """Trains with and without compiled blocks; between steps calls fail, and are caught."""
    return [interrupted(way) for way in (each_block, nothing)]


class Pair(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Forked(nn.Module):
    """Blocks that begin with the same layer, more than are gathered ahead."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Pair(first) for _ in range(5))
        self.rest = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.rest(x)


def interrupted(way: Callable[..., Any]) -> list[float]:
    torch.compiler.reset()
    torch.manual_seed(0)
    net = Forked()
    if way is each_block:
        # A module of torch's own: the compiler skips its frames, and looks at what they call.
        net.rest.compile(backend="aot_eager")
    model = smp.DistributedModel(way(net, {"backend": "aot_eager", "fullgraph": True}))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    x = torch.ones(4, WIDTH)

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        model.backward(loss)
        return loss

    @smp.step
    def differ(x: torch.Tensor) -> torch.Tensor:
        # What both begin with is gathered already when the ranks are seen to differ.
        loss = net.blocks[4 * smp.rank()](x).sum()
        model.backward(loss)
        return loss

    def expect_shards() -> None:
        assert all(isinstance(each, ShardedParameter) for each in net.parameters())

    losses = []
    for _ in range(3):
        losses.append(step(x).reduce_mean().item())
        optimizer.step()
        optimizer.zero_grad()
        expect_shards()
        with pytest.raises(SMPError, match="in the same order"):
            differ(x)
        expect_shards()
        is_compiled = way is each_block
        told = pytest.raises(SMPError, match="outside of a step function")
        with told if is_compiled else contextlib.nullcontext():
            net.blocks[0](x)
        expect_shards()
        with torch.no_grad():
            losses.append(model(x).square().sum().item())
        expect_shards()
    if way is each_block:
        assert not breaks()
    return losses


def breaks() -> dict[str, int]:
    """Returns where the compiler gave up; nothing of the library's own is to be compiled."""
    from torch._dynamo.utils import counters

    return dict(counters["graph_break"])


class Writes(nn.Module):
    """Changes its weight while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(2.0)
        return self.linear(x)


def train_once(net: nn.Module) -> None:
    model = smp.DistributedModel(net)

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    step(torch.randn(4, WIDTH))


def refused(writes: bool, options: dict[str, Any]) -> str:
    torch.compiler.reset()
    net = Writes() if writes else Net()
    net.compile(**options)
    with pytest.raises(UnsupportedError) as caught:
        train_once(net)
    return str(caught.value)


def test_what_compiled_code_may_not_do_with_shards(worlds: Worlds) -> None:
    for rank in run(worlds, WORLDS["shards"], refused, True, {"backend": "eager"}):
        assert "Writes wrote to linear.weight" in rank
    for rank in run(worlds, WORLDS["shards"], refused, False, {"mode": "reduce-overhead"}):
        assert "CUDA graphs" in rank
        assert "sharded_data_parallel_degree" in rank


def products_of_steps() -> Any:
    """Trains compiled blocks by a compiler that counts products with weights, but of no forward."""
    from torch._dynamo.backends.common import aot_autograd

    torch.compiler.reset()
    products = 0

    def compile_backward(graph: Any, inputs: Any) -> Any:
        nonlocal products
        products += sum("aten.mm" in str(node.target) for node in graph.graph.nodes)
        return graph.forward

    backend = aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=compile_backward)
    losses, _ = train("each_block", 0.0, False, backend)
    return losses, products


def test_gradients_of_compiled_code_wait_where_others_do(worlds: Worlds) -> None:
    whole = run(worlds, WORLDS["pp2"], products_of_steps)
    halves = run(worlds, WORLDS["halves"], products_of_steps)
    for (losses, num_whole), (same_losses, num_halves) in zip(whole, halves, strict=True):
        assert losses == same_losses
        # Of a layer's two products, one gives the gradient of the weight.
        assert num_whole == 2 * num_halves > 0


def compile_step_functions() -> None:
    model = smp.DistributedModel(Net(0.0))

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        model.backward(loss)
        return loss

    losses = [smp.step(body)(torch.ones(4, WIDTH))]
    with pytest.warns(UserWarning, match="compile the model, or modules in it"):
        losses.append(smp.step(torch.compile(body, fullgraph=True))(torch.ones(4, WIDTH)))
    with pytest.warns(UserWarning, match="compile the model, or modules in it"):
        losses.append(torch.compile(smp.step(body), fullgraph=True)(torch.ones(4, WIDTH)))
    assert losses[0].reduce_sum() == losses[1].reduce_sum() == losses[2].reduce_sum()


@pytest.mark.parametrize("world", ["one", "pp2"])
def test_step_functions_are_not_compiled_themselves(worlds: Worlds, world: str) -> None:
    run(worlds, WORLDS[world], compile_step_functions)


def compile_between_steps() -> None:
    torch.compiler.reset()
    net = Net(0.0)
    model = smp.DistributedModel(net)
    smp.step(lambda x: model.backward(model(x).sum()))(torch.ones(4, WIDTH))

    @torch.compile(backend="eager")
    def halve(weight: torch.Tensor) -> torch.Tensor:
        return weight.mul_(0.5).square().sum()

    first, *_, last = net.parameters()  # each of another partition
    before = counters["frames"]["total"]
    with torch.no_grad():
        for parameter in (first, last):
            want = float(parameter.square().sum()) / 4
            assert float(halve(parameter)) == pytest.approx(want, rel=1e-5)
    # Of the script, but none of the library's own, which follows what is done with parameters.
    assert counters["frames"]["total"] - before < 20


def test_compiled_functions_take_parameters_of_all_partitions_between_steps(
    worlds: Worlds,
) -> None:
    run(worlds, WORLDS["pp2"], compile_between_steps)


def switch_the_compiler_off() -> None:
    net = Net(0.0)
    net.compile(disable=True)
    model = smp.DistributedModel(net)

    @smp.step
    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    torch.manual_seed(0)
    step(torch.ones(4, WIDTH))


@pytest.mark.parametrize("world", ["one", "pp2"])
def test_a_compiler_that_is_switched_off_stays_off(worlds: Worlds, world: str) -> None:
    run(worlds, WORLDS[world], switch_the_compiler_off)


class Meeting(nn.Module):
    """Multiplies an activation with another one, as layers do with their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.linear(x), x)


#: What a block begins with that comes to it from the other partition.
BEGINNINGS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "meeting": lambda: nn.Sequential(Meeting(), nn.LazyLinear(WIDTH)),
}


def gradients_of(beginning: str, backend: str) -> list[torch.Tensor]:
    """Returns those that a step gives to a model whose blocks begin so."""
    torch.compiler.reset()
    torch.manual_seed(0)
    net = nn.Sequential(
        *(
            nn.Sequential(BEGINNINGS[beginning](), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in "1234"
        )
    )
    net(torch.ones(WIDTH, WIDTH))
    for block in net if backend else ():
        block.compile(backend=backend)
    model = smp.DistributedModel(net)

    @smp.step
    def step(x: torch.Tensor) -> Any:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    step(torch.randn(2 * WIDTH, WIDTH, generator=generator(1)))
    return [each.grad.cpu() for _, each in model.local_named_parameters()]


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_what_comes_from_another_partition_is_no_weight(worlds: Worlds, beginning: str) -> None:
    for backend in ("", "aot_eager"):
        (want,) = run(worlds, WORLDS["one"], gradients_of, beginning, "")
        found = run(worlds, WORLDS["halves"], gradients_of, beginning, backend)
        got = [each for one in found for each in one]
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)
