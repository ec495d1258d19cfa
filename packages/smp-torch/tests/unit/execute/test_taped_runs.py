"""Tapes of generated passes, what lies between their products compiled: the same numbers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from smdistributed.modelparallel.torch.compat.private.backward import (
    engine_replaced,
    saved_tensors_hooks,
)
from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensorMode,
    past_function_modes,
)
from smdistributed.modelparallel.torch.execute import compiled_runs
from smdistributed.modelparallel.torch.execute.compiled_runs import CompiledRun, CompiledRuns
from smdistributed.modelparallel.torch.execute.taped_runs import TapedRuns
from smdistributed.modelparallel.torch.tape.recording import Recording
from smdistributed.modelparallel.torch.tape.running import run
from smdistributed.modelparallel.torch.tape.tape import Call, Tape
from smdistributed.modelparallel.torch.tensors.functions import DIFFERENTIATING

CPU = torch.device("cpu")
DEVICES = ("cpu",)
SHAPE = (4, 8)
#: How many passes are tried in a quick run, and besides in a long one.
QUICK, SLOW = 6, 60


class Seeded:
    """Draws have numbers that go by their keys."""

    @contextlib.contextmanager
    def seeded(self, key: tuple[str, int, int], lane: int) -> Iterator[None]:
        """See ``Keyed``."""
        with past_function_modes():
            state = torch.get_rng_state()
            torch.manual_seed(key[1])
        yield
        with past_function_modes():
            torch.set_rng_state(state)


class Net(nn.Module):
    """What passes use from outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.rows = nn.Embedding(4, 8)
        self.scale = nn.Parameter(torch.randn(8))
        self.unused = nn.Parameter(torch.randn(8))
        self.register_buffer("mean", torch.zeros(8))
        self.index = torch.arange(4)


#: What is there, what a pass uses from outside, and what stands around draws.
Step = Callable[[Sequence[torch.Tensor], Net, Any], torch.Tensor]


def _written(tensors: Sequence[torch.Tensor], net: Net, draw: Any) -> torch.Tensor:
    """Writes to a tensor of which a view is read later."""
    made = tensors[0] * 2
    half = made[:, :4]
    made.mul_(1.5)
    made[:, 4:] = tensors[-1][:, :4]
    return torch.cat([half.tanh() + 1, made[:, 4:]], -1)


def _written_later(tensors: Sequence[torch.Tensor], net: Net, draw: Any) -> torch.Tensor:
    """Writes to what calls before have made of it."""
    made = (tensors[0] + 1) * 3
    before = made.sigmoid().sin()
    made.add_(1)
    return before + made


def _buffer(tensors: Sequence[torch.Tensor], net: Net, draw: Any) -> torch.Tensor:
    before = net.mean * 2 + 1
    net.mean.mul_(0.9).add_(tensors[0].detach().mean(0))
    return tensors[0] + before - net.mean


def _drawn(tensors: Sequence[torch.Tensor], net: Net, draw: Any) -> torch.Tensor:
    with draw():
        return F.dropout((tensors[0] * 2).tanh(), 0.5) * 3 + 1


def _without_gradients(tensors: Sequence[torch.Tensor], net: Net, draw: Any) -> torch.Tensor:
    with torch.no_grad():
        factor = (tensors[-1] * net.scale + 1).sigmoid()
    return tensors[0] * factor + factor


def _cast(tensors: Sequence[torch.Tensor], net: Net, draw: Any) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (net.linear(tensors[0]).softmax(-1) * 2 + 1).to(tensors[0].dtype)


def _again(tensors: Sequence[torch.Tensor], net: Net, draw: Any) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return net.linear(F.gelu(x * 2).sin() + 1)

    found: torch.Tensor = checkpoint(inner, tensors[0], use_reentrant=False)
    return found


def _heads(tensors: Sequence[torch.Tensor], net: Net, draw: Any) -> torch.Tensor:
    q, k, v = (net.linear(each).view(4, 2, 4).transpose(0, 1) for each in tensors)
    q = torch.cat([-q[..., 2:], q[..., :2]], dim=-1) * 2 + q
    return (F.scaled_dot_product_attention(q, k * 2, v + q).transpose(0, 1)).reshape(SHAPE)


STEPS: dict[str, Step] = {
    "numbers": lambda t, net, draw: (t[0] * 0.3 + t[-1]).tanh() - 1e-3,
    "norm": lambda t, net, draw: net.norm(t[0] + t[-1]) * net.scale,
    "product": lambda t, net, draw: net.linear(t[0]) + t[-1],
    "twice": lambda t, net, draw: net.linear(net.linear(t[0]).relu() + t[-1]),
    "parts": lambda t, net, draw: torch.cat([each * 2 for each in t[0].chunk(2, -1)], -1),
    "turned": lambda t, net, draw: (t[0].t() + t[-1].view(8, 4)).t().contiguous().cos().sin(),
    "largest": lambda t, net, draw: t[0] - t[0].max(-1, keepdim=True).values + t[0].amax(),
    "mean": lambda t, net, draw: (t[0] - t[0].mean(-1, keepdim=True)) * t[0].var(-1)[..., None],
    "rows": lambda t, net, draw: net.rows(net.index) * t[0] + 1,
    "same": lambda t, net, draw: t[0].to(torch.float64).contiguous() * t[0].shape[0] + 1,
    "detached": lambda t, net, draw: (t[0].detach() * 2).sinh().tanh().clamp(max=3) + t[-1],
    "of the host": lambda t, net, draw: t[0] * torch.tensor([1.0, 2.0] * 4) + torch.ones(8),
    "data": lambda t, net, draw: t[0] * net.scale.data + t[-1].data,
    "asking": lambda t, net, draw: (t[0] * 2 if t[0].requires_grad else t[0]) + t[-1],
    "view": lambda t, net, draw: t[0].view(2, 2, 8)[:, 0].repeat(2, 1),
    "written": _written,
    "written later": _written_later,
    "buffer": _buffer,
    "drawn": _drawn,
    "without gradients": _without_gradients,
    "cast": _cast,
    "again": _again,
    "heads": _heads,
}


def taken_down(names: Sequence[str], net: Net, x: torch.Tensor) -> Tape:
    """Returns the tape of a pass of some steps, each of which uses the last ones and the first."""
    recording = Recording(
        *(CPU, DEVICES, [x], [], lambda function: function),
        FakeTensorMode(allow_non_fake_inputs=True),
        known_hooks=saved_tensors_hooks(),
    )
    draws = 0

    def draw() -> contextlib.AbstractContextManager[None]:
        nonlocal draws
        draws += 1
        key = ("a layer", draws, 0)
        return recording.drawing(key, 0, lambda: Seeded().seeded(key, 0))

    with recording.recording():
        tensors = [x, x + 1]
        for name in names:
            tensors.append(STEPS[name]((tensors[-1], tensors[-2], tensors[0]), net, draw))
        # No gradient comes to what is read without.
        seen = (tensors[-1] * net.unused + 1).tanh()
        seen = seen * seen.shape[0]  # a question gives none either
        tensors.append(tensors[-1].sin().tanh())
        tensors.append(tensors[-1] + F.linear(seen, net.linear.weight).detach())
        results = [tensors[-1] * 1.0, tensors[len(tensors) // 2].sum()]
    recording.end(results)
    assert not recording.tape.refusal
    return recording.tape


def computed(tape: Tape, net: Net, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Returns what a pass gives, the gradients, and what it leaves in a buffer."""

    def nothing_earlier(reference: object) -> torch.Tensor:
        raise AssertionError

    x = x.detach().requires_grad_()
    with torch.no_grad():
        net.mean.zero_()
    net.zero_grad()
    results, _ = run(tape, [x], nothing_earlier, Seeded(), DEVICES)
    (results[0].sum() + results[1]).backward()
    gradients = [each.grad for each in net.parameters()]
    return [*results, x.grad, *gradients, net.mean.clone()]


def compiled(tape: Tape, *, are_differentiated: bool = True) -> Tape:
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    runs = CompiledRuns({"backend": "aot_eager"})
    return TapedRuns(runs, CPU, DEVICES, fakes, are_differentiated=are_differentiated).of(tape)


def programs() -> Iterator[Any]:
    """Yields passes in which each step has several neighbours; the first ones have each twice."""
    chosen = random.Random(0)
    every = [*STEPS]
    for number in range(QUICK + SLOW):
        if number % (QUICK // 2) == 0:
            chosen.shuffle(every)
        names = tuple(every[number % (QUICK // 2) :: QUICK // 2])
        yield pytest.param(names, marks=[pytest.mark.slow] if number >= QUICK else [])


@pytest.mark.parametrize("names", [*programs()], ids=" ".join)
def test_compiled_runs_compute_what_the_tape_does(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    net = Net().double()
    x = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tape = taken_down(names, net, x.requires_grad_())
    shorter = compiled(tape)
    assert any(
        isinstance(each, Call) and isinstance(each.function, CompiledRun) for each in shorter.events
    )
    assert len(shorter.events) < len(tape.events)
    expected = computed(tape, net, x)
    # No code can be compiled while a graph is captured.
    monkeypatch.setattr(compiled_runs, "compiler_errors", tuple)
    with torch.compiler.set_stance("fail_on_recompile"):
        found = computed(shorter, net, x)
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(other, one, rtol=1e-11, atol=1e-11)


def test_calls_that_give_nothing_are_made_once_and_stay() -> None:
    passes = []

    def body(x: torch.Tensor) -> torch.Tensor:
        loss = (x.sin() * 2).exp().sum()
        loss.backward()
        return loss.detach()

    x = torch.ones(4, requires_grad=True)
    recording = Recording(
        *(CPU, DEVICES, [x], [], lambda function: function),
        FakeTensorMode(allow_non_fake_inputs=True),
    )
    with torch.autograd.set_multithreading_enabled(False), recording.recording():
        result = body(x)
    recording.end([result])

    def differentiate(engine: Any, *args: Any, **options: Any) -> Any:
        passes.append(args)
        return engine(*args, **options)

    with engine_replaced(differentiate):
        shorter = compiled(recording.tape, are_differentiated=False)
        assert not passes  # a script's own would have been counted
    backward = [each for each in recording.tape.events if isinstance(each, Call)]
    assert (
        [each.function for each in backward if each.function in DIFFERENTIATING]
        == [
            each.function
            for each in shorter.events
            if isinstance(each, Call) and each.function in DIFFERENTIATING
        ]
        != []
    )
