"""Tapes: recorded, run again, confirmed by the same Python, and left by other Python."""

from __future__ import annotations

import contextlib
import ctypes
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.between import atomic, when_real
from smdistributed.modelparallel.torch.compat.fused import fused
from smdistributed.modelparallel.torch.compat.private import fusion
from smdistributed.modelparallel.torch.compat.private.backward import applied_alone
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensorMode, TorchDispatchMode
from smdistributed.modelparallel.torch.tape import recording as recording_module
from smdistributed.modelparallel.torch.tape.answers import is_answered
from smdistributed.modelparallel.torch.tape.confirming import Confirming
from smdistributed.modelparallel.torch.tape.promised import Promised
from smdistributed.modelparallel.torch.tape.recording import Recording
from smdistributed.modelparallel.torch.tape.running import run
from smdistributed.modelparallel.torch.tape.tape import Tape

CPU = torch.device("cpu")
DEVICES = ("cpu",)
Pass = Callable[[torch.Tensor], torch.Tensor]


class Random:
    """Keys nothing."""

    @contextlib.contextmanager
    def seeded(self, key: tuple[str, int, int], lane: int) -> Iterator[None]:
        """See ``Keyed``."""
        yield


class Alone:
    """No other ranks; counts what is said to them."""

    def __init__(self) -> None:
        self.left = self.ended = 0
        self.way = ""

    def confirming(self, leave: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """See ``Others``."""
        return contextlib.nullcontext()

    def leave(self) -> None:
        """See ``Others``."""
        self.left += 1

    def confirmed(self) -> None:
        """See ``Others``."""
        self.ended += 1


def fakes() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def recorded(call: Pass, x: torch.Tensor, *, is_given_ahead: bool = False) -> Tape:
    recording = Recording(
        CPU, DEVICES, [x], [], lambda function: function, fakes(), is_given_ahead=is_given_ahead
    )
    with recording.recording():
        result = call(x)
    recording.end([result])
    return recording.tape


def confirmed(promised: Promised, call: Pass, x: torch.Tensor) -> tuple[bool, Any, Alone]:
    """Returns whether Python went another way, what it gave, and what others were told."""
    others = Alone()
    confirming = Confirming(promised, CPU, DEVICES, Random(), lambda: [x.detach()], others)
    (given,) = promised.given(0, 1)
    with confirming.confirming():
        result = call(given)
        confirming.end([result])
        del given
        if not confirming.is_off:
            del result
            if promised.are_held([]):
                confirming.leave("kept")
            result = promised.results[0] if confirming.is_off else None
            confirming.confirmed()
    others.way = confirming.other_way
    return confirming.is_off, result, others


@pytest.mark.parametrize("is_seeded", [False, True])
def test_code_that_seeds_in_the_middle_of_a_draw_is_not_captured(is_seeded: bool) -> None:
    x = torch.ones(4)
    recording = Recording(CPU, DEVICES, [x], [], lambda function: function, fakes())
    state = torch.get_rng_state()
    with (
        recording.recording(),
        recording.drawing(("a layer", 0, 0), 0, contextlib.nullcontext),
    ):
        if is_seeded:
            torch.manual_seed(torch.initial_seed() + 1)
        result = x + torch.randn(4)
    recording.end([result])
    torch.set_rng_state(state)
    assert ("seeds the generators" in recording.tape.refusal) is is_seeded


def nothing_earlier(reference: object) -> torch.Tensor:
    raise AssertionError


class Layer(nn.Module):
    """Computes with what Python has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.factor = 2.0
        self.calls = 0
        self.kept: Any = None
        self.keeps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = F.gelu(self.linear(x)) * self.factor
        out = torch.zeros(x.shape)
        out[:, :2] = h[:, 2:]
        out += h
        if self.keeps:
            self.kept = h
        return out.sum(-1) if out.shape[0] > 1 else out


def gradients(call: Pass, layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    call(x).sum().backward()
    return [each.grad.clone() for each in layer.parameters() if each.grad is not None]


@pytest.fixture
def layer() -> Layer:
    return Layer()


def of_tape(tape: Tape) -> Pass:
    return lambda x: run(tape, [x], nothing_earlier, Random(), DEVICES)[0][0]


def test_a_tape_computes_what_was_recorded(layer: Layer) -> None:
    tape = recorded(layer, torch.randn(3, 4))
    assert not tape.refusal
    x = torch.randn(3, 4)
    assert torch.equal(of_tape(tape)(x), layer(x))
    pairs = zip(gradients(of_tape(tape), layer, x), gradients(layer, layer, x), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert layer.calls == 3


def test_python_that_does_the_same_computes_nothing(layer: Layer) -> None:
    promised = Promised(recorded(layer, torch.randn(3, 4)), {})
    for _ in range(2):
        is_off, result, others = confirmed(promised, layer, torch.randn(3, 4))
        assert (is_off, result, others.left, others.ended) == (False, None, 0, 1)
    assert layer.calls == 3


#: By what is done, what is told of it; the names of functions are torch's.
OTHER_WAYS = {
    "factor": r"mul is called in test_tape.py:\d+ where its arguments or torch's settings were",
    "keeps": "kept",
    "function": r"relu is called in test_tape.py:\d+ where gelu was",
    "weight": "linear is called in .* where its arguments or",
    "grad": "linear is called in .* where its arguments or",
    "autocast": "linear is called in .* where its arguments or",
}


@pytest.mark.parametrize("moment", OTHER_WAYS)
def test_python_that_goes_another_way_computes_as_it_is(
    layer: Layer, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    promised = Promised(recorded(layer, torch.randn(3, 4)), {})
    around: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if moment == "factor":
        layer.factor = 3.0
    elif moment == "keeps":
        layer.keeps = True
    elif moment == "function":
        monkeypatch.setattr(F, "gelu", torch.relu)
    elif moment == "weight":
        layer.linear.weight = nn.Parameter(layer.linear.weight.detach() * 2)
    elif moment == "grad":
        around = torch.no_grad()
    else:
        around = torch.autocast("cpu", torch.bfloat16)
    x = torch.randn(3, 4)
    with around:
        want = layer(x)
        is_off, result, others = confirmed(promised, layer, x)
    assert (is_off, others.left) == (True, 1)
    assert re.search(OTHER_WAYS[moment], others.way), others.way
    assert torch.equal(result, want)
    assert result.requires_grad == want.requires_grad
    if want.requires_grad:
        own = torch.autograd.grad(result.sum(), list(layer.parameters()))
        expected = torch.autograd.grad(want.sum(), list(layer.parameters()))
        assert all(map(torch.equal, own, expected))
    assert layer.calls == 3
    # What was kept is a tensor, and promises are made anew.
    assert layer.kept is None or torch.isfinite(layer.kept).all()
    layer.kept, layer.keeps, layer.factor = None, False, 2.0
    promised.renew()
    assert confirmed(promised, layer, x)[0] == (moment in ("function", "weight"))


@pytest.mark.parametrize("moment", ["nothing", "written", "given a gradient"])
def test_what_is_asked_of_tensors_from_outside_is_asked_again(moment: str) -> None:
    weight = nn.Parameter(torch.ones(4))
    buffer = torch.zeros(4)

    def call(x: torch.Tensor) -> torch.Tensor:
        factor = 2.0 if weight.grad is None else 3.0
        buffer[0] = 1.0
        return x * weight * factor * (weight._version + 1)

    promised = Promised(recorded(call, torch.ones(2, 4)), {})
    if moment == "written":
        with torch.no_grad():
            weight.mul_(2)
    elif moment == "given a gradient":
        weight.grad = torch.ones(4)
    buffer.zero_()
    x = torch.randn(2, 4)
    is_off, result, _ = confirmed(promised, call, x)
    assert is_off == (moment != "nothing")
    # What writes is the graph's alone.
    assert buffer[0] == float(is_off)
    assert result is None or torch.equal(result, call(x))


def positions(x: torch.Tensor) -> torch.Tensor:
    """Asks what a mask is, which depends on the shape of what is given alone."""
    mask = torch.arange(x.shape[1]).expand(x.shape) < x.shape[1]
    return x * 2 if mask.all() else x * 3


def written(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(x.shape)
    view = mask[0]
    mask.copy_(x)
    return x * 2 if view.sum() > 0 else x * 3


def test_numbers_that_are_the_same_in_every_pass_may_be_asked_for() -> None:
    tape = recorded(positions, torch.randn(3, 4))
    assert not tape.refusal
    x = torch.randn(3, 4)
    assert torch.equal(of_tape(tape)(x), x * 2)
    is_off, _, _ = confirmed(Promised(tape, {}), positions, x)
    assert not is_off
    assert "asks for the numbers" in recorded(written, torch.randn(3, 4)).refusal


def test_less_and_more_than_on_the_tape_is_another_way(layer: Layer) -> None:
    promised = Promised(recorded(layer, torch.randn(3, 4)), {})
    x = torch.randn(3, 4)
    for call in (lambda x: layer(x) * 2, layer.linear):
        is_off, result, _ = confirmed(promised, call, x)
        assert is_off
        assert torch.equal(result, call(x))
        promised.renew()


def test_what_a_promise_is_asked_past_functions_of_torch_is_an_error(layer: Layer) -> None:
    promised = Promised(recorded(layer, torch.randn(3, 4)), {})
    with pytest.raises(UnsupportedError, match="cuda_graphs=False"):
        torch._C._VariableFunctions.add(promised.promises[0], 1)


class Doubled(torch.autograd.Function):
    """A function of a script's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


APPLIED_BEFORE = Doubled.apply
APPLIED_PAST_ALL = applied_alone(Doubled)
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    SCRIPTED = torch.jit.trace(lambda x: x * 2, torch.ones(2))
    DOUBLE_IN_PLACE = torch.jit.trace(lambda x: x.mul_(2), torch.ones(2))


def doubled_in_place(x: torch.Tensor) -> torch.Tensor:
    h = x.detach() * 3
    DOUBLE_IN_PLACE(h)
    return h


def hooked(x: torch.Tensor) -> torch.Tensor:
    h = x * 2
    h.register_hook(lambda gradient: gradient)
    return h


class Exponentials(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.exp.default
        return func(*args, **(kwargs or {}))


class Watching(TorchDispatchMode):
    """A mode of a script's own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def watched(x: torch.Tensor) -> torch.Tensor:
    with Watching():
        return x * 2


def moved(x: torch.Tensor) -> torch.Tensor:
    WEIGHT.data = WEIGHT.data.clone()
    return x * WEIGHT


GENERATOR = torch.Generator()


def drawn(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(x.shape, generator=GENERATOR.manual_seed(0))


def copied(x: torch.Tensor) -> torch.Tensor:
    return x * nn.Parameter(WEIGHT.detach().clone())


def filled_in_memory(x: torch.Tensor) -> torch.Tensor:
    """Computes as kernels do that are given where a tensor is."""
    (ctypes.c_float * x.numel()).from_address(x.data_ptr())[0] = 3.0
    return x


WEIGHT = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (Doubled.apply, "written in Python"),
        (APPLIED_BEFORE, "written in Python"),
        (APPLIED_PAST_ALL, "autograd was told of a tensor"),
        (SCRIPTED, "is called past the functions of torch"),
        (doubled_in_place, "is called past the functions of torch"),
        (hooked, "RemovableHandle"),
        (watched, "a mode or a transform"),
        (torch.func.vmap(lambda x: x * 2), "a mode or a transform|past the functions of torch"),
        (moved, "other memory|past the functions of torch"),
        (drawn, "a generator of its own"),
        (lambda x: x * 2 + torch.rand_like(x) * 0, "the library gives no key"),
        (copied, "of another one past the functions of torch"),
        (lambda x: checkpoint(torch.sin, x, use_reentrant=True), "use_reentrant=True"),
        (lambda x: filled_in_memory(x * 2), "asks for the numbers of a tensor"),
        (lambda x: x * 2 if x.sum().item() > 0 else x * 3, "asks for the numbers of a tensor"),
        (lambda x: x * len(WEIGHT.data_ptr().to_bytes(8)), "asks for the numbers of a tensor"),
    ],
)
def test_what_a_tape_cannot_hold_is_refused(call: Pass, reason: str) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    want = call(x)
    recording = Recording(CPU, DEVICES, [x], [], lambda function: function, fakes())
    with recording.recording():
        result = call(x)
    recording.end([result])
    assert torch.equal(result, want)
    assert recording.tape.refusal
    assert any(each in recording.tape.refusal for each in reason.split("|"))


def _noted(x: torch.Tensor) -> torch.Tensor:
    seen = torch.zeros(x.shape)
    seen[x > 0] = 1
    return x * 2 if seen.all() else x * 3


def _noted_past_autograd(x: torch.Tensor) -> torch.Tensor:
    seen = torch.zeros(4)
    seen.data.add_(x[0])
    return x * 2 if (seen > 0).all() else x * 3


def _noted_in_a_view(x: torch.Tensor) -> torch.Tensor:
    seen = torch.zeros(4)
    seen.view(2, 2).data.copy_(x[0].view(2, 2))
    return x * 2 if (seen > 0).all() else x * 3


def _changed_past_autograd(x: torch.Tensor) -> torch.Tensor:
    seen = x * 1
    seen.data.fill_(3.0)
    return x * 2 if (seen > 0).all() else x * 3


#: What decides, of what is given alone.
QUESTIONS: dict[str, Callable[[torch.Tensor], bool]] = {
    "all": lambda x: bool((x > 0).all()),
    "not all": lambda x: not (x > 0).all(),
    "of a part": lambda x: bool((x[:, :2] > 0).all() and (x[:, 2:] > 0).all()),
    "of a view": lambda x: bool(x.t().reshape(-1)[0] > 0),
    "with numbers of the host": lambda x: bool((x > torch.tensor(0.0)).all()),
    "of two": lambda x: torch.equal(x, x.abs()),
    "for one": lambda x: (x > 0).all().is_nonzero(),
    "in another type": lambda x: bool((x.double().sum(-1, keepdim=True) > 0).any()),
    "outside": lambda x: bool((x.cumsum(0).masked_fill(x == 0, 1) > 0).all()),
}


@pytest.mark.parametrize("asks", QUESTIONS.values(), ids=QUESTIONS)
def test_what_is_given_answers_ahead(asks: Callable[[torch.Tensor], bool]) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if asks(x) else x - 1

    one, like_it, other = torch.rand(3, 4) + 1, torch.rand(3, 4) + 1, -torch.rand(3, 4) - 1
    assert "asks for the numbers" in recorded(call, one).refusal
    tape = recorded(call, one, is_given_ahead=True)
    assert not tape.refusal
    assert torch.equal(of_tape(tape)(one), call(one))
    for x, is_alike in ((one, True), (like_it, True), (other, False)):
        assert is_answered(tape, [x], Random(), DEVICES) is is_alike
    is_off, _, _ = confirmed(Promised(tape, {}), call, like_it)
    assert not is_off


@pytest.mark.parametrize(
    "alias",
    [
        lambda x: x.data,
        lambda x: x.data.view(2, 2),
        lambda x: torch.from_numpy(x.numpy()),
        torch.from_dlpack,
    ],
)
def test_what_a_step_writes_to_is_not_asked_ahead(alias: Pass) -> None:
    counter = torch.zeros(4)

    def call(x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if (x > 3).all() else x - 1
        counter.add_(1)  # of which the next pass is given the memory, with versions of its own
        return x

    tape = recorded(call, alias(counter), is_given_ahead=True)
    assert "writes to what it asks about" in tape.refusal


@atomic
def _exchanged(x: torch.Tensor) -> torch.Tensor:
    """Stands for what waits for other ranks, which would not come ahead of the pass."""
    return x + 1


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x * 2 if _exchanged(x).sum() > 0 else x,
        lambda x: x * 2 if (x * WEIGHT).sum() > 0 else x,
        lambda x: x * 2 if (x + 1).add_(1).sum() > 0 else x,
        lambda x: x * int((x > 0).sum()),
        _noted,
        _noted_past_autograd,
        _noted_in_a_view,
        _changed_past_autograd,
    ],
)
@pytest.mark.parametrize("is_given_ahead", [False, True])
def test_others_are_not_asked_ahead(call: Pass, is_given_ahead: bool) -> None:
    tape = recorded(call, torch.randn(3, 4), is_given_ahead=is_given_ahead)
    assert "asks for the numbers" in tape.refusal


def test_what_is_checkpointed_is_computed_again_from_the_tape() -> None:
    calls = []
    weight = torch.randn(4, requires_grad=True)

    def inside(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.exp(x * weight) * factor

    def call(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        with torch.no_grad():  # as models do that compute positions for their layers
            factor = torch.cos(x)
        x = checkpoint(inside, x, factor, use_reentrant=False)
        return checkpoint(inside, x, factor, use_reentrant=False) + 1

    x = torch.randn(3, 4, requires_grad=True)
    tape = recorded(call, x)
    assert not tape.refusal
    assert tape.has_regions
    want = torch.autograd.grad(call(x).sum(), [x, weight])
    count = len(calls)
    total = of_tape(tape)(x).sum()
    with Exponentials() as seen:
        own = torch.autograd.grad(total, [x, weight])
    assert all(map(torch.equal, own, want))
    assert seen.count == 2
    assert len(calls) == count
    is_off, _, _ = confirmed(Promised(tape, {}), call, x)
    assert not is_off
    assert len(calls) == count + 2


def test_functions_of_the_library_are_one_call() -> None:
    ran = []

    @atomic
    def both(x: torch.Tensor, factor: float) -> torch.Tensor:
        ran.append(factor)
        return torch.sin(x) * factor

    factors = [2.0]

    def call(x: torch.Tensor) -> torch.Tensor:
        return both(x, factors[0]) + 1

    tape = recorded(call, torch.randn(3))
    assert len(tape.events) == 2
    promised = Promised(tape, {})
    assert not confirmed(promised, call, torch.randn(3))[0]
    assert len(ran) == 1
    factors[0] = 3.0
    x = torch.randn(3)
    is_off, result, _ = confirmed(promised, call, x)
    assert is_off
    assert torch.equal(result, torch.sin(x) * 3 + 1)


def test_what_is_compiled_on_gpus_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def in_kernels(x: torch.Tensor, factor: float) -> torch.Tensor:
        compiled.append(factor)
        return torch.sin(x) * factor

    # As on a GPU: no kernels are made while operations are watched.
    monkeypatch.setattr(
        fusion, "runs_kernels", lambda tensor: not torch._C._len_torch_dispatch_stack()
    )
    monkeypatch.setattr(fusion, "_compiled", lambda function: in_kernels)
    both = fused(lambda x, factor: torch.sin(x) * factor)

    def call(x: torch.Tensor) -> torch.Tensor:
        return both(x, 2.0) + 1

    promised = Promised(recorded(call, torch.randn(3)), {})
    assert compiled == [2.0]
    assert not confirmed(promised, call, torch.randn(3))[0]
    assert compiled == [2.0]


def test_what_wants_tensors_waits_for_them() -> None:
    seen: list[torch.Tensor] = []
    factors = [2.0]

    def call(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        when_real(h, lambda tensor: seen.append(tensor.detach().clone()))
        return h + factors[0]

    promised = Promised(recorded(call, torch.ones(2)), {})
    seen.clear()
    assert not confirmed(promised, call, torch.ones(2))[0]
    assert not seen
    factors[0] = 3.0
    assert confirmed(promised, call, torch.ones(2))[0]
    assert [each.tolist() for each in seen] == [[2.0, 2.0]]


def test_python_of_compiled_modules_is_compared_as_it_is_written(layer: Layer) -> None:
    ran: list[int] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: object) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            ran.append(1)
            return graph(*args)

        return call

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.factor = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x)) * self.factor

    block = Block()
    block.compile(backend=backend)

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(block(x))

    x = torch.randn(3, 4)
    call(x)
    tape = recorded(call, x)
    assert not tape.refusal
    promised = Promised(tape, {})
    ran.clear()
    assert torch.equal(of_tape(tape)(x), call(x))
    assert len(ran) == 2
    assert not confirmed(promised, call, x)[0]
    assert len(ran) == 2
    block.factor = 3.0
    is_off, result, _ = confirmed(promised, call, x)
    assert is_off
    assert torch.equal(result, torch.sin(torch.relu(block.linear(x)) * 3))


# Dynamo makes an object of an autograd function's class.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "left out"])
def test_a_backward_pass_in_python_is_refused_unless_it_is_compiled(*, is_compiled: bool) -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not is_compiled:
                torch._dynamo.graph_break()
                return doubled(torch.sin(x))
            return Doubled.apply(torch.sin(x))

    @torch.compiler.disable
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x)

    block = Block()
    block.compile(backend="aot_eager")
    x = torch.ones(2, requires_grad=True)
    block(x)
    tape = recorded(lambda x: block(x), x)
    assert bool(tape.refusal) == (not is_compiled), tape.refusal
    if is_compiled:
        assert confirmed(Promised(tape, {}), block, x)[0] is False
    else:
        assert "backward pass that is written in Python" in tape.refusal


class Cache:
    """An object with state."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []


class Cached(nn.Module):
    """Leaves what it has computed in a cache, and can go another way."""

    goes_another_way = False

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        y = torch.sin(x) if self.goes_another_way else torch.cos(x)
        cache.seen.append(y)
        return torch.exp(y * 2)


def test_calls_of_a_compiled_module_that_is_given_a_cache_are_those_of_the_tape() -> None:
    block, x, caches = Cached(), torch.ones(2), list[Cache]()
    block.compile(backend="aot_eager")

    def call(x: torch.Tensor) -> torch.Tensor:
        caches.append(Cache())
        result = block(x, caches[-1])
        assert len(caches[-1].seen) == 1
        if len(caches) > 1:
            caches[-1].seen.clear()
        return result

    tape = recorded(call, x)
    assert not tape.refusal
    assert tape.compiler is not None
    assert [each.function for each in tape.events] == [torch.cos, torch.Tensor.mul, torch.exp]
    promised = Promised(tape, {})
    assert confirmed(promised, call, x)[0] is False
    block.goes_another_way = True
    is_off, result, _ = confirmed(promised, call, x)
    assert is_off
    assert torch.equal(result, torch.exp(torch.sin(x) * 2))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("draws", "and draws"),
        ("has graphs", "and has graphs"),
        ("is one of two", "several backends"),
        ("is checkpointed", "in a checkpoint"),
    ],
)
def test_a_compiled_module_that_is_given_a_cache_is_refused_if_it(how: str, reason: str) -> None:
    block, other, cache = Cached(), Cached(), Cache()
    block.compile(backend="aot_eager")
    other.compile(backend="eager")

    @contextlib.contextmanager
    def around(recording: Recording) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if how == "draws":
                stack.enter_context(recording.drawing(("", 0, 0), 0, contextlib.nullcontext))
            if how == "has graphs":
                stack.enter_context(
                    mock.patch.object(recording_module, "uses_cuda_graphs", return_value=True)
                )
            yield

    recording = Recording(CPU, DEVICES, [torch.ones(2)], [], lambda function: function, fakes())
    with recording.recording(), around(recording):
        if how == "is checkpointed":
            result = checkpoint(block, torch.ones(2), cache, use_reentrant=False)
        else:
            result = block(torch.ones(2), cache)
        if how == "is one of two":
            other(torch.ones(2), cache)
    recording.end([result])
    assert reason in recording.tape.refusal
