"""Activations in host memory: the numbers stay to the bit, and the memory goes."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from half_cases import same_bits
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as native

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.api.slot import slot
from smdistributed.modelparallel.torch.patches.checkpoint import checkpoint
from smdistributed.modelparallel.torch.sharding.home import is_sharded

WIDTH = 16
LAYERS = 8
ROWS = 4
ALL = 10_000


class Block(nn.Module):
    """Draws, and keeps more than it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any, context: Any = None, mask: Any = None) -> Any:
        if isinstance(x, tuple):
            return self(*x), x[1] * 1.5
        inner = torch.tanh(self.up(x if context is None else x + context))
        if mask is not None:
            inner = torch.where(mask, inner, 0.5)
        return x + self.down(self.drop(inner))


class Stack(nn.Module):
    """A sequence of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(self.first(x))


class Compiled(Stack):
    """Each block is compiled, together with its checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        for number, block in enumerate(self.layers):
            smp.set_activation_checkpointing(block)
            if number % 2:
                block.compile(backend="aot_eager")
            else:
                self.layers[number] = torch.compile(block, backend="aot_eager")


class Pairs(Stack):
    """Its blocks take and give a tuple."""

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        return self.layers((x, torch.sin(x)))[0]


class Glue(nn.Module):
    """Regions that share an input, read a mask, lie in one another, and change their input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.register_buffer("mask", torch.arange(2 * WIDTH) % 3 > 0)

    def two(self, index: int, x: torch.Tensor, context: torch.Tensor, mask: Any) -> torch.Tensor:
        x = torch.sin(checkpoint(self.blocks[index], x, context, mask))
        return self.blocks[index + 1](x, context)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = torch.sin(self.first(x))
        x = context
        for index in range(0, LAYERS - 2, 2):
            x = checkpoint(functools.partial(self.two, index), x, context, self.mask)
            x = torch.cos(x[:, torch.arange(WIDTH - 1, -1, -1)])
        x = native(self.blocks[-2], x, context, use_reentrant=True)
        # Not laid out densely: it stays.
        wide = torch.cat([x, x], 1)
        return native(self.blocks[-1], wide[:, :WIDTH], use_reentrant=False)


def microbatches() -> int:
    return int(smp.state.cfg.microbatches)


@contextlib.contextmanager
def configured(**parameters: Any) -> Iterator[None]:
    """Gives step functions that are made inside another configuration."""
    runtime = slot.get()
    former = runtime.config
    runtime.config = former.model_copy(update=parameters)
    try:
        yield
    finally:
        runtime.config = former


class Inputs:
    """Counts the memories of real inputs of blocks that are alive."""

    def __init__(self) -> None:
        self.seen: list[StorageWeakRef] = []
        self.most = 0

    def watch(self, module: nn.Module) -> None:
        for each in module.modules():
            if isinstance(each, Block):
                each.register_forward_pre_hook(self.note)

    def note(self, module: nn.Module, args: Any) -> None:
        if type(args[0]) is torch.Tensor:
            self.seen.append(StorageWeakRef(args[0].untyped_storage()))
            self.count()

    def count(self) -> None:
        self.seen = [each for each in self.seen if not each.expired()]
        self.most = max(self.most, len({each.cdata for each in self.seen}))


def train(
    kind: type[nn.Module], horizon: int | None, *, steps: int = 2, **parameters: Any
) -> dict[str, Any]:
    """Returns what steps of a new model give, with a horizon or without offloading."""
    given = {"offload_activations": horizon is not None, **parameters}
    with configured(
        **given, **({} if horizon is None else {"activation_loading_horizon": horizon})
    ):
        torch.manual_seed(1)
        with smp.model_creation(tensor_parallelism=smp.tp_size() > 1):
            module = kind()
        if hasattr(module, "layers") and kind is not Compiled:
            smp.set_activation_checkpointing(module.layers, pack_args_as_tuple=kind is Pairs)
        inputs = Inputs()
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        inputs.watch(model.get_module())

        @smp.step
        def step(model: Any, x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        memory = []
        losses: list[torch.Tensor] = []
        gradients = {}
        torch.manual_seed(7)
        for _ in range(steps):
            optimizer.zero_grad()
            losses += step(model, torch.randn(microbatches() * ROWS, WIDTH)).outputs
            gradients = {
                name: each.grad.clone()
                for name, each in model.local_named_parameters()
                if not is_sharded(each)
            }
            optimizer.step()
            if horizon is not None:
                memory.append(step.activation_memory())
        gc.collect()
    return {
        "losses": [loss.item() for loss in losses],
        "gradients": gradients,
        "parameters": model.state_dict(),
        "memory": memory,
        "inputs": inputs.most,
    }


def same(kind: type[nn.Module], horizons: tuple[int, ...] = (1, ALL), **parameters: Any) -> None:
    """Every horizon gives the bits of a run without, and says where activations were."""
    want = train(kind, None, **parameters)
    for horizon in horizons:
        got = train(kind, horizon, **parameters)
        assert got["losses"] == want["losses"]
        for what in ("gradients", "parameters"):
            assert got[what].keys() == want[what].keys()
            for name, value in want[what].items():
                same_bits(got[what][name], value, name)
        last = got["memory"][-1]
        assert last.num_late == 0
        # What several regions share goes once, and comes back to each.
        assert last.fetched_bytes >= last.stored_bytes
        assert kind is Glue or last.fetched_bytes == last.stored_bytes
        if horizon == ALL:
            assert last.stored_bytes == 0
        got["horizon"] = horizon
        want.setdefault("others", []).append(got)
    near, far = (each["memory"][-1] for each in want["others"])
    if kind is Glue:  # of which a rank can have too few regions
        return
    assert 0 < near.peak_host_bytes <= near.stored_bytes
    assert near.peak_device_bytes < far.peak_device_bytes
    assert near.peak_device_bytes + near.peak_host_bytes >= far.peak_device_bytes
    # On a GPU the last ones are still on their way out.
    if kind is Stack and not torch.cuda.is_available():
        assert want["others"][0]["inputs"] < want["inputs"], (want["others"], want["inputs"])


def case_a_sequence() -> None:
    same(Stack)


def case_compiled_blocks() -> None:
    same(Compiled)


def case_all_forward_passes_first() -> None:
    same(Stack, pipeline="simple", active_microbatches=microbatches())


def case_tuples() -> None:
    same(Pairs)


def case_regions_in_glue() -> None:
    same(Glue)


def case_bytes_follow_the_horizon() -> None:
    """One partition: of the layers so many are back as the horizon says, and one is in use."""
    layer = ROWS * WIDTH * 4
    for horizon in (1, 2, 4):
        first, second = train(Stack, horizon)["memory"]
        assert first.peak_host_bytes == LAYERS * layer  # how many there are was not known
        for memory in (first, second):
            assert memory.peak_device_bytes == (horizon + 1) * layer
        # The last ones are needed at once: so many tasks are between them and their backward.
        stay = (horizon + 1) // 2
        assert second.peak_host_bytes == (LAYERS - stay) * layer
        assert second.stored_bytes == microbatches() * (LAYERS - stay) * layer


def case_a_graph_outlives_its_step() -> None:
    """A second backward pass through one graph, and one after the step, find what they need."""
    torch.manual_seed(0)
    module = Stack()
    smp.set_activation_checkpointing(module.layers)
    model = smp.DistributedModel(module)

    @smp.step(detach_outputs=False)
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        return loss

    found = []
    for given in ({"offload_activations": False}, {"activation_loading_horizon": 1}):
        model.zero_grad()
        torch.manual_seed(3)
        with configured(**{"offload_activations": True, **given}):
            function = smp.step(detach_outputs=False)(step._function)
            for loss in function(model, torch.randn(microbatches() * ROWS, WIDTH)).outputs:
                loss.backward()
        found.append([each.grad.clone() for each in model.parameters()])
    for one, other in zip(*found, strict=True):
        same_bits(one, other, "twice")


def case_changes_in_place_are_refused_as_without() -> None:
    """What stays is not copied: that it was changed since must be seen."""

    class Changing(Glue):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.cat([self.first(x), self.first(x)], 1)[:, :WIDTH]
            y = checkpoint(self.blocks[0], x)
            x.add_(1)
            return y

    message = "modified by an inplace operation"
    for horizon in (None, 1):
        with pytest.raises(RuntimeError, match=message):
            train(Changing, horizon)


def case_nothing_to_offload_is_said_once() -> None:
    with configured(offload_activations=True):
        model = smp.DistributedModel(nn.Linear(WIDTH, 1))

        @smp.step
        def step(model: Any, x: torch.Tensor, backward: bool) -> torch.Tensor:
            loss = model(x).mean()
            if backward:
                model.backward(loss)
            return loss

        with pytest.raises(SMPError, match="set offload_activations to True, and call"):
            step.activation_memory()
        given = torch.ones(microbatches() * ROWS, WIDTH)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, given, False)
        with pytest.warns(UserWarning, match=re.escape("step function step has none")):
            step(model, given, True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, given, True)
        assert step.activation_memory().stored_bytes == 0


#: The others need one partition.
EVERYWHERE = (
    "a_sequence",
    "compiled_blocks",
    "all_forward_passes_first",
    "tuples",
    "regions_in_glue",
)
CASES: dict[str, Callable[[], None]] = {
    name.removeprefix("case_"): case
    for name, case in list(globals().items())
    if name.startswith("case_")
}
