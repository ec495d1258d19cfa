"""Capture, cut, generated programs and itineraries, without processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded import CPU, Recorded
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.planning.schedule import Kind
from smdistributed.modelparallel.common.planning.simulator import build_schedule
from smdistributed.modelparallel.torch.execute.itinerary import prepare
from smdistributed.modelparallel.torch.execute.program import Program
from smdistributed.modelparallel.torch.planning.segments import Plan
from smdistributed.modelparallel.torch.random.keys import StepRandom
from smdistributed.modelparallel.torch.record.ir import NodeKind
from smdistributed.modelparallel.torch.state.carried import CarriedObjects

WIDTH = 4
ALTERNATING = {"layers.0": 0, "layers.1": 1, "layers.2": 0, "layers.3": 1}
LONGER = {f"layers.{index}": index % 2 for index in range(6)}
HALVES = {"layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1}


class Net(nn.Module):
    def __init__(
        self,
        between: Callable[..., torch.Tensor] = lambda x, first: torch.tanh(x),
        num_layers: int = 4,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("offset", torch.rand(WIDTH))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.layers[0](x) * self.scale + self.offset
        for layer in self.layers[1:]:
            x = layer(self.between(x, first))
        return x


def recorded(
    partitions: dict[str, int], between: Any = None
) -> tuple[Recorded, Callable[..., Any]]:
    torch.manual_seed(0)
    module = Net(between, len(partitions)) if between else Net()
    step = Recorded(module, partitions)

    def body(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(x).square().mean()
        step.backward(loss)
        return loss

    return step, body


def run(plan: Plan, *inputs: torch.Tensor) -> dict[int, torch.Tensor]:
    """Runs all segments in order, as one process would."""
    values: dict[int, torch.Tensor] = {}
    inputs += tuple(each.tensor for each in plan.graph.constants)
    for segment in plan.segments:
        program = Program(plan, segment, CPU, StepRandom(CPU))
        arguments = [values[value.index] for value in segment.inputs]
        results = program.run(inputs, CarriedObjects(), *arguments)
        values |= {
            value.index: result for value, result in zip(segment.outputs, results, strict=True)
        }
    return values


def without_gradient(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        shift = first * 2 + x.mean()
    return x + shift


BETWEEN: dict[str, Callable[..., Any]] = {
    "tanh": lambda x, first: torch.tanh(x),
    "skip": lambda x, first: x + first,
    "in place": lambda x, first: (x * 2).add_(1).relu_(),
    "keywords and slices": lambda x, first: torch.cat([x[:, 2:], x[..., :2]], dim=-1).clamp(min=0),
    "no grad": without_gradient,
    "detach": lambda x, first: x + first.detach() * torch.ones_like(x),
    "list": lambda x, first: torch.stack(list(x.unbind(1)), 1),
    "constant": lambda x, first: x + torch.arange(WIDTH, dtype=x.dtype),
    "in place on an earlier result": lambda x, first: first.add_(1) * 0.5 + x,
    "infinity": lambda x, first: x.masked_fill(x > 0, float("-inf")).clamp(min=-1.0),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("partitions", [HALVES, ALTERNATING], ids=["halves", "alternating"])
def test_programs_compute_what_the_module_does(partitions: dict[str, int], between: str) -> None:
    step, body = recorded(partitions, BETWEEN[between])
    x = torch.randn(3, WIDTH)
    plan = step.plan(body, x)
    values = run(plan, x)
    expected = step.module(x).square().mean()
    (returned,) = plan.graph.returned
    assert torch.equal(values[returned.index], expected)
    expected.backward()
    wanted = {name: p.grad for name, p in step.module.named_parameters()}
    step.module.zero_grad()
    values[returned.index].backward()  # type: ignore[no-untyped-call]
    for name, parameter in step.module.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name])


def test_segments_follow_the_partitions() -> None:
    step, body = recorded(ALTERNATING)
    plan = step.plan(body, torch.randn(3, WIDTH))
    assert [segment.rank for segment in plan.segments] == [0, 1, 0, 1]
    assert plan.backward == {0, 1, 2, 3}
    leaves = [node for node in plan.graph.nodes if node.kind is NodeKind.LEAF]
    assert [node.name for node in leaves] == [f"layers.{index}" for index in range(4)]
    assert [node.rank for node in leaves] == [0, 1, 0, 1]


def test_a_recording_is_the_same_every_time_and_knows_a_difference() -> None:
    x = torch.randn(3, WIDTH)
    digests = []
    for between in (BETWEEN["tanh"], BETWEEN["tanh"], BETWEEN["skip"]):
        step, body = recorded(HALVES, between)
        digests.append(step.plan(body, x).digest())
    assert digests[0] == digests[1] != digests[2]


def test_a_model_is_current_until_a_module_or_parameter_changes() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    fakes = Recorded(module, {}).fakes
    module(torch.randn(3, WIDTH))
    module[1].running_mean = torch.zeros(WIDTH)
    assert fakes.is_current
    module[0].bias = nn.Parameter(torch.zeros(WIDTH))
    assert not fakes.is_current
    fakes = Recorded(module, {}).fakes
    module[1] = nn.BatchNorm1d(WIDTH)
    assert not fakes.is_current


def test_capture_leaves_no_trace() -> None:
    step, body = recorded(HALVES)
    before = {name: (id(p), p.clone()) for name, p in step.module.named_parameters()}
    call, state = nn.Module.__call__, torch.get_rng_state()
    step.plan(body, torch.randn(3, WIDTH))
    torch.manual_seed(5)
    after_seed = torch.get_rng_state()
    step.plan(body, torch.ones(3, WIDTH))
    assert torch.equal(torch.get_rng_state(), after_seed)
    assert not torch.equal(state, after_seed)
    assert nn.Module.__call__ is call
    for name, parameter in step.module.named_parameters():
        assert id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1])
        assert parameter.grad is None


def test_capture_undoes_its_patches_when_the_body_fails() -> None:
    step, body = recorded(HALVES)
    call, apply = nn.Module.__call__, torch.autograd.Function.apply

    def fail(x: torch.Tensor) -> None:
        body(x)
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        step.plan(fail, torch.ones(3, WIDTH))
    assert nn.Module.__call__ is call
    assert torch.autograd.Function.apply == apply
    assert all(type(each) is nn.Parameter for each in step.module.parameters())


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (lambda x, first: x if x.sum() > 0 else -x, "depend on the value of an activation"),
        (lambda x, first: x * float(x.mean()), "depend on the value of an activation"),
        (lambda x, first: x if x.mean().item() > 0 else -x, "depend on the value of an activation"),
        (lambda x, first: x[x[:, 0] > 0], "depend on the value of an activation"),
    ],
    ids=["branch", "float", "branch on item", "shape"],
)
def test_what_a_replay_cannot_repeat_is_refused(between: Any, message: str) -> None:
    step, body = recorded(ALTERNATING, between)
    with pytest.raises(UnsupportedError, match=message):
        step.plan(body, torch.randn(3, WIDTH))


def test_switches_around_a_call_are_set_in_a_replay() -> None:
    seen: list[tuple[bool, bool]] = []

    class Looking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((torch.backends.cuda.flash_sdp_enabled(), torch.backends.cudnn.enabled))
            return super().forward(x)

    module = nn.ModuleList(Looking(WIDTH, WIDTH) for _ in range(4))
    step = Recorded(module, {"0": 0, "1": 0, "2": 1, "3": 1})

    def body(x: torch.Tensor) -> torch.Tensor:
        x = module[0](x)
        with sdpa_kernel(SDPBackend.MATH):
            x = module[1](x)
            with torch.backends.cudnn.flags(enabled=False):
                x = module[2](x)
        return module[3](x)

    x = torch.randn(3, WIDTH)
    plan = step.plan(body, x)
    seen.clear()
    run(plan, x)
    assert seen == [(True, True), (False, True), (False, False), (True, True)]
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batch"])
def test_ctc_loss_is_recorded_although_it_looks_at_lengths(
    batch: tuple[int, ...], reduction: str
) -> None:
    targets = torch.randint(1, WIDTH, (*batch, 2))
    lengths = torch.full(batch, 5), torch.full(batch, 2)

    def losses(x: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(x.log_softmax(-1), targets, *lengths, reduction=reduction)

    step, _ = recorded(HALVES)

    def body(x: torch.Tensor) -> torch.Tensor:
        result = losses(step.module(x))
        step.backward(result.mean())
        return result

    x = torch.randn(5, *batch, WIDTH)
    plan = step.plan(body, x)
    (returned,) = plan.graph.returned
    expected = losses(step.module(x))
    assert returned.shape == tuple(expected.shape)
    assert torch.equal(run(plan, x)[returned.index], expected)


class Memory:
    """Holds a constant from the start, and what modules leave in it."""

    def __init__(self) -> None:
        self.offset = torch.full((WIDTH,), 0.5)
        self.kept: dict[str, torch.Tensor] = {}


class Keeper(nn.Linear):
    def forward(self, x: torch.Tensor, memory: Memory, name: str) -> torch.Tensor:  # type: ignore[override]
        memory.offset.add_(1)
        memory.kept[name] = x = super().forward(x) + memory.offset
        return x


class WithMemory(nn.Module):
    def __init__(self, prepare: Callable[[Memory, torch.Tensor], None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeper(WIDTH, WIDTH) for _ in range(2))
        self.prepare = prepare

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = Memory()
        self.prepare(memory, x)
        for name, layer in enumerate(self.layers):
            x = layer(x, memory, str(name))
        return x


def test_an_object_that_is_handed_over_may_hold_constants() -> None:
    module = WithMemory(lambda memory, x: None)
    step = Recorded(module, {"layers.0": 0, "layers.1": 0})
    x = torch.randn(3, WIDTH)
    plan = step.plan(module, x)
    carried = CarriedObjects()
    for _ in range(2):
        (segment,) = plan.segments
        (result,) = Program(plan, segment, CPU, StepRandom(CPU)).run([x], carried)
        assert torch.equal(result, module(x))  # each microbatch starts with 0.5
        carried.clear()


def test_an_object_that_is_handed_over_may_not_hold_activations() -> None:
    module = WithMemory(lambda memory, x: memory.kept.update(x=x))
    step = Recorded(module, {"layers.0": 0, "layers.1": 1})
    with pytest.raises(UnsupportedError, match="Memory that holds activations"):
        step.plan(module, torch.randn(3, WIDTH))


def test_a_decision_may_be_computed_from_random_numbers() -> None:
    # One way or the other: which, the key of the draw says.
    step, body = recorded(HALVES, lambda x, first: x if torch.rand([]) * 2 < 1 else -x)
    plan = step.plan(body, torch.randn(3, WIDTH))
    assert len(plan.segments) == 2


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_draws_if_it_has_dropout(dropout: float) -> None:
    def attend(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        x = x[None, None]
        return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout)[0, 0]

    step, body = recorded(HALVES, attend)
    plan = step.plan(body, torch.randn(3, WIDTH))
    draws = [
        node.draw for node in plan.graph.nodes if node.target is F.scaled_dot_product_attention
    ]
    assert len(draws) == 3
    assert all((draw is not None) is (dropout > 0) for draw in draws)


class Accumulating(nn.Linear):
    """Keeps a sum from call to call."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.total: torch.Tensor | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.total = x if self.total is None else self.total + x
        self.calls += 1
        return self.total * 1


class WithAccumulators(nn.Module):
    def __init__(self, before: Callable[[Any], Any], after: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Accumulating() for _ in range(2))
        self.before, self.after = before, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            self.before(layer)
            x = layer(x)
            self.after(layer)
        return x


def nothing(layer: Accumulating) -> None:
    pass


def reset(layer: Accumulating) -> None:
    layer.total = None


def look(layer: Accumulating) -> bool:
    return layer.calls > 3


def take(layer: Accumulating) -> Any:
    return layer.total


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (reset, nothing, "total"),
        (look, nothing, "calls"),
        (nothing, take, None),
        (nothing, nothing, None),
    ],
)
def test_state_that_both_glue_and_leaves_use_is_refused(
    before: Any, after: Any, name: str | None
) -> None:
    module = WithAccumulators(before, after)
    step = Recorded(module, {"layers.0": 0, "layers.1": 1})
    if name is None:
        step.plan(module, torch.randn(3, WIDTH))
        return
    with pytest.raises(UnsupportedError, match=f"{name} is changed by the module that has it"):
        step.plan(module, torch.randn(3, WIDTH))


def test_a_decision_from_inputs_leads_to_one_way_or_another() -> None:
    step, body = recorded(HALVES)

    def decide(x: torch.Tensor) -> torch.Tensor:
        return body(x if bool((x > 0).all()) else -x)

    plan = step.plan(decide, torch.ones(3, WIDTH))
    assert not plan.inputs_of_rank(1)  # rank 0 of the pipeline decides for all
    ways = [step.way(decide, sign * torch.ones(3, WIDTH)).number for sign in (1, -1, 1, -1)]
    assert ways == [0, 1, 0, 1]


def copied(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(x)
    made.copy_(x)
    return made


def squeezed(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    return (x[None] * 1).squeeze_(0)


@pytest.mark.parametrize("between", [copied, squeezed])
def test_a_cut_knows_what_an_operation_in_place_made_of_a_tensor(between: Any) -> None:
    step, body = recorded(HALVES, between)
    x = torch.randn(3, WIDTH)
    for plan in (step.plan(body, x), step.plan(body, x)):
        (value,) = plan.segments[1].inputs
        assert (value.shape, value.requires_grad) == ((3, WIDTH), True)
        assert value in plan.with_gradient
        assert plan.backward == {0, 1}


@pytest.mark.parametrize("policy", ["simple", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("between", ["tanh", "skip"])
@pytest.mark.parametrize(
    "partitions", [HALVES, ALTERNATING, LONGER], ids=["halves", "alternating", "longer"]
)
def test_every_message_is_sent_once_and_taken_once(
    partitions: dict[str, int], between: str, policy: Any
) -> None:
    step, body = recorded(partitions, BETWEEN[between])
    plan = step.plan(body, torch.randn(3, WIDTH))
    microbatches = 3
    graph = plan.segment_graph(2, halves=policy == "zero_bubble")
    schedule = build_schedule(graph, microbatches, policy, 4).schedule
    plans = [plan] * microbatches
    itineraries = [prepare(plans, schedule, rank) for rank in range(2)]
    sent = [m for itinerary in itineraries for sends in itinerary.sends for m in sends]
    assert len(sent) == len(set(sent)) > 0
    for rank, itinerary in enumerate(itineraries):
        other = 1 - rank
        out_of_other = [m for sends in itineraries[other].sends for m in sends if m.target == rank]
        assert [m for posts in itinerary.posts for m in posts] == out_of_other
        needed = [m for needs in itinerary.needs for m in needs]
        # Also what several segments of a rank read, as the first result in a longer model.
        assert sorted(needed) == sorted(out_of_other)
        assert itinerary.rooms.keys() == {(0, 1), (1, 0)}
    activations = sum(message.kind is Kind.FORWARD for message in sent)
    assert activations == len(sent) / 2  # each comes back as a gradient


@pytest.mark.parametrize("policy", ["simple", "interleaved", "zero_bubble"])
def test_a_message_is_let_go_when_an_answer_tells_that_it_was_used(policy: Any) -> None:
    step, body = recorded(HALVES, BETWEEN["tanh"])
    plan = step.plan(body, torch.randn(3, WIDTH))
    graph = plan.segment_graph(2, halves=policy == "zero_bubble")
    schedule = build_schedule(graph, 4, policy, 4).schedule
    itineraries = [prepare([plan] * 4, schedule, rank) for rank in range(2)]
    for rank, itinerary in enumerate(itineraries):
        others = itineraries[1 - rank]
        answered = [m for messages in itinerary.answered for m in messages]
        assert len(answered) == len(set(answered))
        assert {m.source for m in answered} <= {rank}
        for position, messages in enumerate(itinerary.answered):
            # Whatever has come from the other one by then, it has sent after it used these.
            come = {m for needs in itinerary.needs[: position + 1] for m in needs}
            last = max((p for p, sends in enumerate(others.sends) if come & {*sends}), default=-1)
            used = {m for needs in others.needs[: last + 1] for m in needs}
            assert used.issuperset(messages)
    # Gradients are sent for activations: the first rank knows of all that it has sent.
    assert sorted(m for messages in itineraries[0].answered for m in messages) == sorted(
        m for sends in itineraries[0].sends for m in sends
    )


@pytest.mark.parametrize("given", [{}, {"device": "cpu"}])
def test_new_tensors_name_the_default_device(given: dict[str, str]) -> None:
    def between(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        torch.arange(WIDTH, **given)  # type: ignore[call-overload]
        return x

    step, body = recorded(HALVES, between)
    x = torch.empty(2, WIDTH)
    with torch.device("meta"):
        way = step.way(body, x)
    nodes = [each for each in way.graph.nodes if each.target is torch.arange]
    devices = {torch.device(each.kwargs["device"]).type for each in nodes}
    assert devices == {"cpu" if given else "meta"}
