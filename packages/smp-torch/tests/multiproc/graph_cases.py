"""Training with passes that are captured as CUDA graphs, beside the same without."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from host_graphs import HostGraphs
from torch import nn
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.execute import bodies, pieces, taping
from smdistributed.modelparallel.torch.execute.captured_bodies import ConfirmedBodies
from smdistributed.modelparallel.torch.execute.replay import Replay
from smdistributed.modelparallel.torch.gradients.buckets import Bucket
from smdistributed.modelparallel.torch.gradients.elsewhere import GradientElsewhere
from smdistributed.modelparallel.torch.gradients.reduction import GradientReduction
from smdistributed.modelparallel.torch.sharding.parameter import held
from smdistributed.modelparallel.torch.stepping import captures

WIDTH, STEPS = 16, 8
MICROBATCHES = 4


class Own(nn.Linear):
    """A layer that does something besides, with what it keeps."""

    def __init__(self, more: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.more = more
        self.calls = 0
        self.factor = 1.0
        self.log: list[int] = []
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(self, super().forward(x))


def _counted(layer: Own, x: torch.Tensor) -> torch.Tensor:
    layer.calls += 1
    return x * (1 + 1 / layer.calls)


def _asking(layer: Own, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum().item() > 0 else x


def _averaging(layer: Own, x: torch.Tensor) -> torch.Tensor:
    layer.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - layer.mean.clone()


def _rebinding(layer: Own, x: torch.Tensor) -> torch.Tensor:
    layer.mean = layer.mean * 0.9 + x.detach().mean(0) * 0.1
    return x - layer.mean


class Leaving(nn.Module):
    """Leaves a layer out from some call on: what has no gradient is not updated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.second(x if self.calls > 16 else self.first(x))


def _on_the_host(layer: Own, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand((), device="cpu").item()


def _in_python(layer: Own, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def _factor(layer: Own, x: torch.Tensor) -> torch.Tensor:
    return x * layer.factor


class Cache:
    """Travels through the layers."""

    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []


class Caching(nn.Linear):
    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        x = super().forward(x)
        cache.sums.append(x.detach().sum())
        return x * torch.sigmoid(cache.sums[-1])


class WithCache(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        for layer in self:
            x = layer(x, cache)
        return x


def _around(layer: nn.Module) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH), nn.ReLU(), layer, nn.GELU(), nn.Linear(WIDTH, WIDTH)),
        *(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    )


def _compiled_with_cache() -> nn.Module:
    net = WithCache(Caching(WIDTH, WIDTH) for _ in range(4))
    for layer in net:
        layer.compile(backend="aot_eager")
    return net


def _compiled() -> nn.Module:
    """Returns blocks that are compiled, in which there is something to split."""
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    net = nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), each) for each in (inner, nn.Tanh())))
    for block in net:
        block.compile(backend="aot_eager")
    return net


class Settings(dict[str, float]):
    """Settings with code of their own, which who looks at them runs."""

    def items(self) -> Any:
        """See ``dict``."""
        return super().items()


class Checkpointed(nn.Linear):
    """Is computed again in its backward pass, and may count how often it is computed."""

    def __init__(self, step: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.settings = Settings(factor=2.0)
        self.calls, self.step = 0, step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self._compute, x, use_reentrant=False)
        return result

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.step
        return torch.tanh(super().forward(x) * self.settings["factor"])


class Layers(nn.Module):
    """Transformer layers that tensor-parallel ranks compute together, two tokens an example.

    Args:
        dropout: of everything that is dropped.
    """

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = smp.nn.DistributedTransformer(
            num_layers=2,
            num_attention_heads=2,
            attention_head_size=WIDTH // 2,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            attention_dropout_prob=dropout,
            hidden_dropout_prob=dropout,
            activation="gelu_new",
            fused_bias_gelu=True,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.layers((x.view(-1, 2, WIDTH), None))
        return hidden.reshape(x.shape)


ANOTHER_WAY = "the Python of its modules did something else"
#: Of a recorded step, and of the body of one that is not.
ASKS = "decides by numbers|asks for the numbers of a tensor"
#: Of one whose module changes when it is computed again.
KEEPS_STATE = "a module keeps state, and is computed again"
#: By name: the model, and why a rank does not run it as captured; "" if both do.
NETS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "plain": (lambda: _around(nn.Linear(WIDTH, WIDTH)), ""),
    "normed": (lambda: _around(nn.BatchNorm1d(WIDTH)), ""),
    "averages": (lambda: _around(Own(_averaging)), ""),
    "cache": (lambda: WithCache(Caching(WIDTH, WIDTH) for _ in range(4)), ""),
    "dropout": (lambda: _around(nn.Dropout(0.5)), "of the host are not captured"),
    "counts": (lambda: _around(Own(_counted)), ANOTHER_WAY),
    "rebinds": (lambda: _around(Own(_rebinding)), ANOTHER_WAY),
    "checkpointed": (lambda: _around(Checkpointed(0)), ""),
    "checkpointed, counting": (lambda: _around(Checkpointed(1)), KEEPS_STATE),
    "leaves out": (lambda: _around(Leaving()), ANOTHER_WAY),
    "asks": (lambda: _around(Own(_asking)), ASKS),
    # On a GPU the host's numbers are no constant of a body, which goes another way then.
    "draws on the host": (lambda: _around(Own(_on_the_host)), f"{ASKS}|{ANOTHER_WAY}"),
    "draws in Python": (lambda: _around(Own(_in_python)), ANOTHER_WAY),
    # What compiled code draws is not seen.
    "compiled": (_compiled, "of the host are not captured"),
    # Its Python is taken down, as what it does to a cache is nowhere else.
    "compiled, cache": (_compiled_with_cache, ""),
}


#: The same of models that are made for tensor parallelism.
LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "layers": (lambda: Layers(0.0), ""),
    "layers that drop": (lambda: Layers(0.3), NETS["dropout"][1]),
}


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Moments:
    """What a script does after a step, before the update, and what it keeps of it."""

    def __init__(self, model: Any, layer: Own) -> None:
        self.model = model
        self.layer = layer
        self.kept: list[Any] = []

    def nothing(self, number: int) -> None:
        """Leaves everything as it is."""

    def gradients_kept(self, number: int) -> None:
        """Keeps gradients of a step, and looks at them after the next."""
        if number % 3 == 1:
            self.kept.append([each.grad for _, each in self.model.local_named_parameters()])

    def view_kept(self, number: int) -> None:
        """The same of views."""
        if number % 3 == 1:
            parameters = self.model.local_named_parameters()
            self.kept.append([each.grad.view(-1) for _, each in parameters])

    def attribute(self, number: int) -> None:
        """Changes what a module computes with."""
        self.layer.factor = 1.0 if number < 4 else 0.5

    def evaluated(self, number: int) -> None:
        """Trains and does not."""
        self.model.train(number % 4 != 3)

    def memory(self, number: int) -> None:
        """Gives parameters other memory."""
        if number == 4:
            for _, each in self.model.local_named_parameters():
                each.data = each.data * 0.5

    def frozen(self, number: int) -> None:
        """Freezes a parameter."""
        self.layer.bias.requires_grad_(number < 4)

    def hooked(self, number: int) -> None:
        """Puts a hook on a parameter."""
        if number == 4:
            self.layer.bias.register_hook(lambda gradient: gradient * 2)

    def module_hooked(self, number: int) -> None:
        """Puts a hook on a module."""
        if number == 4:
            self.layer.register_forward_hook(lambda module, args, result: result * 2)

    def hooked_after(self, number: int) -> None:
        """Puts a hook on a parameter that runs when its gradient has been added up."""
        if number == 4:
            self.layer.bias.register_post_accumulate_grad_hook(_halve)

    def gradient_data(self, number: int) -> None:
        """Gives gradients other memory."""
        for _, each in self.model.local_named_parameters():
            if each.grad is not None and number != 5:
                each.grad.data = each.grad.data.clamp(-0.01, 0.01)

    def hook_reads(self, number: int) -> None:
        """Has a hook of a parameter read something that changes."""
        self.factors = [1.0 if number < 4 else 3.0]
        if number == 0:
            self.layer.bias.register_hook(lambda gradient: gradient * self.factors[0])

    def backward_hook(self, number: int) -> None:
        """Takes a hook of a module's backward pass away."""
        if number == 0:
            self.kept_hook = self.layer.register_full_backward_hook(
                lambda module, given, got: (given[0] * 2,)
            )
        if number == 4:
            self.kept_hook.remove()

    def transposed(self, number: int) -> None:
        """Gives a parameter other strides in the same memory."""
        if number == 4:
            self.layer.weight.data = self.layer.weight.data.t()

    def accumulated(self, number: int) -> bool:
        """Adds gradients of two steps up."""
        return number % 4 == 2

    def zeroed(self, number: int) -> None:
        """Leaves gradients there, as zeros; see ``trained``."""


#: Moments after which code of the script runs in backward passes.
RUN_BACKWARD = ("hook_reads", "backward_hook")
MOMENTS = [name for name in vars(Moments) if not name.startswith("_")]


class Reasons(logging.Handler):
    """Keeps why mini-batches ran as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Takes a line of the log."""
        self.found.append(record.getMessage())


@contextlib.contextmanager
def captured() -> Iterator[tuple[list[Any], Reasons]]:
    """Counts what runs as captured; without a GPU something stands for its graphs."""
    reasons, begun = Reasons(), []
    begin, make = Replay.begin, ConfirmedBodies.__init__

    def counted(self: Replay, *args: Any, **options: Any) -> None:
        begun.append(self)
        begin(self, *args, **options)

    def made(self: ConfirmedBodies, *args: Any) -> None:
        begun.append(self)
        make(self, *args)

    captures.logger.addHandler(reasons)
    stand_in = () if torch.cuda.is_available() else (HostGraphs(),)
    graphs_of = (lambda device, **_: stand_in[0]) if stand_in else captures.graphs_of
    try:
        with (
            mock.patch.object(Replay, "begin", counted),
            mock.patch.object(ConfirmedBodies, "__init__", made),
            mock.patch.object(captures, "graphs_of", graphs_of),
        ):
            yield begun, reasons
    finally:
        captures.logger.removeHandler(reasons)


def trained(
    make: Callable[[], nn.Module],
    moment: str,
    *,
    cuda_graphs: bool | str,
    first_alone: bool = False,
) -> tuple[list[float], list[torch.Tensor], list[Any]]:
    """Trains a model; returns losses, what this rank has of it afterwards, and what was kept.

    Args:
        make: makes the model.
        moment: what is done after a step; see ``Moments``.
        cuda_graphs: passes are captured.
        first_alone: only the first rank of a tensor-parallel group does that.
    """
    torch.manual_seed(0)
    random.seed(0)
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1, auto=True):
        net = make()
    layer = next((each for each in net.modules() if isinstance(each, Own)), None)
    # Gradients leave in many buckets, each as soon as it is full.
    model = smp.DistributedModel(net, bucket_cap_mb=0.001)
    fp16 = smp.state.cfg.fp16
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), 0.01),
        dynamic_loss_scale=fp16,
        dynamic_loss_args={"init_scale": 256.0, "scale_window": 3} if fp16 else None,
    )
    moments = Moments(model, layer)

    @smp.step(cuda_graphs=cuda_graphs)
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        # As models of Transformers ask what type they have.
        loss = ((model(x.to(next(model.parameters()).dtype)) - y) ** 2).mean()
        if net.training:
            model.backward(loss)
        return loss

    numbers = torch.Generator(torch.get_default_device()).manual_seed(1 + smp.dp_rank())
    losses = []
    for number in range(STEPS):
        # Two sizes of batches come in turns in the end.
        size = 16 if number < 6 or number % 2 else 8
        x, y = torch.randn(2, size, WIDTH, generator=numbers)
        losses.append(step(x, y).reduce_mean().item())
        has_gradients = net.training
        does = smp.tp_rank() == 0 or not first_alone
        adds_up = getattr(moments, moment)(number) if does else None
        if has_gradients and not adds_up:
            optimizer.step()
            optimizer.zero_grad(set_to_none=moment != "zeroed" or number < 4)
    own = [held(each).detach().clone() for _, each in model.local_named_parameters()]
    own += [each.clone() for _, each in model.local_named_buffers()]
    kept = [[part.clone() for part in each if _is_here(part)] for each in moments.kept]
    return losses, own, kept


def _is_here(part: torch.Tensor | None) -> bool:
    """Whether this rank has the numbers of what is kept; an owner may have those of a gradient."""
    return part is not None and not isinstance(part, GradientElsewhere)


def compare(name: str, moment: str, *, first_alone: bool = False) -> tuple[bool, int, list[str]]:
    """Returns whether training is the same, how many steps ran as captured, and why not others."""
    make, reason = {**NETS, **LAYERS}.get(name, (lambda: _around(Own(_factor)), ""))
    if torch.cuda.is_available():
        # Kernels are chosen, and compiled, in the first steps; the others give other roundings.
        trained(make, "nothing", cuda_graphs=False)
    want = trained(make, moment, cuda_graphs=False, first_alone=first_alone)
    with captured() as (begun, reasons):
        got = trained(make, moment, cuda_graphs=True, first_alone=first_alone)
    pairs = zip((want[1], *want[2]), (got[1], *got[2]), strict=True)
    # In a pipeline a pass that goes another way may put off another product, which some kernels
    # round otherwise.
    # Compiled code adds up a gradient otherwise than what waits for it does.
    is_off = (reason == ANOTHER_WAY or name == "compiled, cache") and smp.pp_size() > 1
    equal = functools.partial(torch.allclose, rtol=1e-5, atol=1e-6) if is_off else torch.equal
    same = got[0] == (pytest.approx(want[0], rel=1e-6) if is_off else want[0]) and all(
        len(one) == len(other) and all(map(equal, one, other)) for one, other in pairs
    )
    return same, len(begun), reasons.found


def _alternating(layer: Own, x: torch.Tensor) -> torch.Tensor:
    layer.calls += 1
    return x * 2 if layer.calls % MICROBATCHES == 3 else x


def taken_down(are_alike: bool) -> tuple[bool, int, int]:
    """Trains a net of which microbatches do the same, or one of them something else.

    Returns:
        whether training is that without graphs, how many tapes were made, and how many steps began
        as captured.
    """
    more = _factor if are_alike else _alternating
    want = trained(lambda: _around(Own(more)), "nothing", cuda_graphs=False)
    with (
        mock.patch.object(bodies, "Recording", side_effect=bodies.Recording) as made,
        mock.patch.object(taping, "Recording", made),
        captured() as (begun, _),
    ):
        got = trained(lambda: _around(Own(more)), "nothing", cuda_graphs=True)
    return want[0] == got[0], made.call_count, len(begun)


def answered(patterns: list[list[bool]], others: list[list[bool]]) -> tuple[bool, int]:
    """Trains by batches whose padding a model asks about, as those of Transformers do.

    Args:
        patterns: of each step, of which microbatches some tokens are padding.
        others: the same on other ranks than the first of a tensor-parallel group.

    Returns:
        whether training is that without graphs, and how many steps began as captured.
    """

    def losses(*, cuda_graphs: bool) -> tuple[list[list[float]], list[torch.Tensor]]:
        torch.manual_seed(0)
        with smp.tensor_parallelism(enabled=smp.tp_size() > 1, auto=True):
            net = _around(Own(_factor))
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01))

        @smp.step(cuda_graphs=cuda_graphs)
        def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x = model(x)
            whole = mask.bool().all()
            loss = (x if whole else x * mask[:, None]).square().mean()
            model.backward(loss)
            return loss

        numbers = torch.Generator(torch.get_default_device()).manual_seed(1 + smp.dp_rank())
        found = []
        for pattern in patterns if smp.tp_rank() == 0 else others:
            x = torch.randn(4 * MICROBATCHES, WIDTH, generator=numbers)
            mask = torch.ones(MICROBATCHES, 4)
            mask[torch.tensor(pattern), 0] = 0
            found.append([each.item() for each in step(x, mask.flatten()).outputs])
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return found, [each.detach().clone() for each in model.parameters()]

    if torch.cuda.is_available():
        losses(cuda_graphs=False)
    want = losses(cuda_graphs=False)
    with captured() as (begun, _):
        got = losses(cuda_graphs=True)
    same = want[0] == got[0] and all(map(torch.equal, want[1], got[1]))
    return same, len(begun)


def launched_by_default() -> tuple[int, list[str]]:
    """Trains by a script that asks for nothing.

    Returns:
        how many steps run as captured, and in the last of them, in order: pieces that add to
        gradients, and buckets that leave.
    """
    events: list[str] = []
    tell, leave = pieces.tell, GradientReduction._launch_one

    def told(piece: pieces.Piece) -> None:
        events.extend(["piece"] if piece.added else [])
        tell(piece)

    def left(self: GradientReduction, bucket: Bucket) -> None:
        events.append("bucket")
        leave(self, bucket)

    with (
        captured() as (begun, _),
        mock.patch.object(pieces, "tell", told),
        mock.patch.object(GradientReduction, "_launch_one", left),
    ):
        trained(NETS["plain"][0], "nothing", cuda_graphs="auto")
    return len(begun), events


class _StopError(Exception):
    """Raised by a step function of a script."""


def turning(name: str, turn: str, *, cuda_graphs: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Trains a model with steps of which every fourth does something else, of which Python knows.

    Args:
        name: of the model.
        turn: what such a step does: goes another ``"way"``, or ``"fails"`` in its last microbatch.
        cuda_graphs: passes are captured.
    """
    torch.manual_seed(0)
    model = smp.DistributedModel(NETS[name][0]())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 0.01))
    script: dict[str, int] = {"step": 0, "microbatch": 0}
    # Without a recording what the microbatches before it have computed stays.
    failing = 4 if cuda_graphs or smp.pp_size() == 1 else 1

    @smp.step(cuda_graphs=cuda_graphs)
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        script["microbatch"] += 1
        turns = script["step"] % 4 == 3
        if turns and turn == "fails" and script["microbatch"] == failing:
            raise _StopError
        loss = ((model(x) - y) ** 2).mean()
        if turns and turn == "way":
            loss = loss.sqrt()
        model.backward(loss)
        return loss

    numbers = torch.Generator(torch.get_default_device()).manual_seed(1)
    losses = []
    for number in range(12):
        script.update(step=number, microbatch=0)
        x, y = torch.randn(2, 16, WIDTH, generator=numbers)
        try:
            losses.append(step(x, y).reduce_mean().item())
        except _StopError:
            losses.append(float("nan"))
        else:
            optimizer.step()
            optimizer.zero_grad()
    if cuda_graphs and smp.pp_size() > 1:
        # What was done ahead has its time, too.
        assert all(each.end > each.start for rank in step.timeline().ranks for each in rank)
    own = [held(each).detach().clone() for _, each in model.local_named_parameters()]
    own += [each.clone() for _, each in model.local_named_buffers()]
    return losses, own


def compare_turning(name: str, turn: str) -> tuple[bool, int]:
    """Returns whether training is the same, and how many first actions were done ahead."""
    want = turning(name, turn, cuda_graphs=False)
    started = []
    start = Replay.start

    def counted(self: Replay, *args: Any) -> None:
        started.append(self)
        start(self, *args)

    with captured(), mock.patch.object(Replay, "start", counted):
        got = turning(name, turn, cuda_graphs=True)
    same = all(one == other or one != one for one, other in zip(want[0], got[0], strict=True))
    return same and all(map(torch.equal, want[1], got[1])), len(started)


def lets_models_go(in_hand: str) -> tuple[list[str], int, bool]:
    """Returns why steps ran as they are, how many did not, and whether their model goes then.

    Args:
        in_hand: "has": the step function has the model, and goes with it.
    """
    gc.collect()  # those of other trials

    def made(own: Any) -> Any:
        @smp.step(cuda_graphs=True)
        def step(model: Any, x: torch.Tensor) -> Any:
            model = own or model
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        return step

    with captured() as (begun, reasons):
        model = smp.DistributedModel(NETS["plain"][0]())
        step = made(model if in_hand == "has" else None)
        for _ in range(4):
            step(model, torch.ones(16, WIDTH))
            model.zero_grad()
        kept = weakref.ref(model.get_module())
        del model
        if in_hand == "has":
            del step
        num_begun = len(begun)
        begun.clear()
        gc.collect()
        return reasons.found, num_begun, kept() is None
