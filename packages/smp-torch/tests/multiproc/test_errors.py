"""Mistakes in a script must be clear errors, on every rank, not hangs or wrong numbers."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import together
import torch
from torch import nn
from world import pipeline, run, run_fresh

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import ConfigError, SMPError, UnsupportedError
from smdistributed.modelparallel.common.testing import RanksFailedError, Worlds, cases_of
from smdistributed.modelparallel.torch.absence.tensors import AbsentTensor

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

WIDTH = 4


class Layers(nn.Module):
    """Linear layers; a glue function of the activation runs between them."""

    def __init__(self, between: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = self.between(x)
        return x


def train(
    model: Any, then: Callable[[torch.Tensor], object] | None = None, x: torch.Tensor | None = None
) -> torch.Tensor:
    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).mean()
        if then is None:
            model.backward(loss)
        else:
            then(loss)
        return loss

    output: torch.Tensor = step(model, torch.ones(4, WIDTH) if x is None else x).reduce_mean()
    return output


def expect(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=text):
        call()


def case_tensor_backward() -> None:
    model = smp.DistributedModel(Layers())
    expect(UnsupportedError, r"model\.backward", lambda: train(model, torch.Tensor.backward))


class Moving(nn.Linear):
    """Writes the number of its call where nothing tells that it did."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = [torch.zeros(())]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return super().forward(x) * self.calls[0]


def case_a_question_behind_state_that_cannot_be_put_back() -> None:
    layers = Layers(lambda x: x if x.sum() > 0 else -x)
    layers.layers[1] = Moving()
    model = smp.DistributedModel(layers)
    expect(UnsupportedError, r"keeps state in Moving\.calls", lambda: train(model))


def _finite(x: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(x).all():
        raise FloatingPointError(f"{int(x.isnan().sum())} are no numbers")
    return x


def case_an_error_that_an_answer_leads_to() -> None:
    model = smp.DistributedModel(Layers(_finite))
    assert train(model).isfinite()
    bad = torch.ones(4, WIDTH)
    bad[2, 1] = torch.nan  # of the second microbatch
    expect(FloatingPointError, "4 are no numbers", lambda: train(model, x=bad))
    assert train(model).isfinite()


class Failing(nn.Linear):
    """Fails for numbers that only a real run has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor and x.max() > 100:
            raise OverflowError("too large")
        return super().forward(x)


def case_a_module_that_fails_before_a_question() -> None:
    layers = Layers(lambda x: x if x.sum() > 0 else -x)
    layers.layers[2] = Failing(WIDTH, WIDTH)
    model = smp.DistributedModel(layers)
    assert train(model).isfinite()
    expect(OverflowError, "too large", lambda: train(model, x=torch.full((4, WIDTH), 1e6)))
    assert train(model).isfinite()


class Routed(nn.Linear):
    """Cuts what it returns by numbers that it finds in it, as mixtures of experts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        sizes = [(x > 0).sum().item(), (x <= 0).sum().item()]
        return torch.cat(x.view(-1).split(sizes)).view(x.shape)


def case_sizes_of_an_activation_keep_a_module_whole() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Routed(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    expected = net(torch.ones(4, WIDTH)).mean().detach()
    torch.testing.assert_close(train(smp.DistributedModel(net)), expected, atol=1e-6, rtol=1e-5)


def _with_other_data(x: torch.Tensor) -> torch.Tensor:
    x.data = x.data * 2
    return x


def case_what_would_do_nothing_between_partitions() -> None:
    with_other_data = smp.DistributedModel(Layers(_with_other_data))
    expect(UnsupportedError, "data", lambda: train(with_other_data))
    model = smp.DistributedModel(Layers())
    expect(UnsupportedError, r"autograd\.backward", lambda: train(model, torch.autograd.backward))

    def look(loss: torch.Tensor) -> None:
        assert next(model.parameters()).grad is None

    expect(UnsupportedError, "grad", lambda: train(model, look))
    assert train(model).isfinite()


def case_a_bare_parameter() -> None:
    model = smp.DistributedModel(Layers())
    scale = nn.Parameter(torch.ones(()))
    call = functools.partial(train, model, lambda loss: model.backward(loss * scale))
    expect(UnsupportedError, "belongs to no DistributedModel", call)


def case_a_split_model_is_not_pickled() -> None:
    # Of a class that can be pickled.
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    for _ in range(2):
        expect(UnsupportedError, "cannot be pickled", functools.partial(pickle.dumps, model))
        train(model)
    expect(UnsupportedError, "cannot be pickled", lambda: pickle.dumps(model.get_module()))


def case_copies_and_calls_of_a_split_model() -> None:
    x = torch.ones(4, WIDTH)
    net = Layers()
    model = smp.DistributedModel(net)
    train(model)
    copied = copy.deepcopy(model)
    average = torch.optim.swa_utils.AveragedModel(net)
    with torch.no_grad():
        before = net(x)
        for one, other in zip(copied.parameters(), net.parameters(), strict=True):
            one.lerp_(other * 0.5, 0.5)  # by three quarters
        average.update_parameters(net)
    whole = Layers()
    whole.load_state_dict(model.state_dict())
    expected = whole(x).detach()
    with torch.no_grad():
        [each.mul_(0.75) for each in whole.parameters()]
        found = copied(x)
    for given, want in ((before, expected), (average(x), expected), (found, whole(x))):
        assert np.allclose(given.detach().numpy(), want.detach().numpy(), atol=1e-6)
    teacher = smp.DistributedModel(copied.requires_grad_(False))
    train(model, lambda loss: model.backward(loss + 0 * teacher(x).sum()))
    with torch.no_grad():
        before = model(x)
        net.layers[0].weight.mul_(2)
        assert not np.allclose(model(x).numpy(), before.numpy())
        assert np.allclose(teacher(x).numpy(), whole(x).numpy(), atol=1e-6)


class Talking(Layers):
    """Has a method that runs the model by itself, as models that generate do."""

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self(x)
        return out


def case_using_the_whole_model_after_training() -> None:
    x = torch.ones(4, WIDTH)
    net = Talking()
    expected = copy.deepcopy(net).generate(x)
    model = smp.DistributedModel(net)
    train(model)
    for call in (
        lambda: model.module.generate(x),
        lambda: model.get_module().generate(x),
        lambda: model.module(x),
        lambda: net(x),
    ):
        expect(SMPError, r"partitions.*model\.cpu\(\).*get_module\(\)", call)
    expect(AttributeError, r"get_module\(\)\.generate.*model\.cpu\(\)", lambda: model.generate(x))
    assert not hasattr(model, "something_else")
    model.cpu()
    assert torch.allclose(model.get_module().generate(x), expected, atol=1e-6)
    assert torch.allclose(copy.deepcopy(net)(x), expected, atol=1e-6)
    # Training goes on; what was gathered does not, and is not taken for what it was.
    assert train(model).isfinite()
    expect(SMPError, "partitions", lambda: net(x))
    absent = [name for name, each in net.named_parameters() if isinstance(each, AbsentTensor)]
    assert absent
    assert not set(absent) & {name for name, _ in model.local_named_parameters()}


def case_states_of_modules_that_are_not_whole() -> None:
    net = Layers()
    model = smp.DistributedModel(net)
    before = net.state_dict()
    train(model)
    told = [each.tolist() for each in model.state_dict().values()]
    for call in (net.state_dict, model.module.state_dict):
        assert [each.tolist() for each in call().values()] == told

        def save(call: Any = call) -> None:
            torch.save(call(), io.BytesIO())

        expect(UnsupportedError, r"state_dict\(\) of the DistributedModel", save)
    here = [layer for layer in net.layers if not isinstance(layer.weight, AbsentTensor)]
    assert here
    assert all(layer.state_dict()["weight"].numel() for layer in here)
    state = model.state_dict()
    assert state.keys() == before.keys()
    model.cpu()
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    train(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    expect(SMPError, r"would hold empty", lambda: train(model, lambda loss: net.state_dict()))


def case_an_exception_of_the_users_can_be_caught() -> None:
    model = smp.DistributedModel(Layers())
    calls = []

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        loss: torch.Tensor = model(x).square().mean()
        if len(calls) in (2, 6):
            raise KeyError("planted")
        model.backward(loss)
        return loss

    x = torch.ones(4, WIDTH)
    losses = []
    for _ in range(5):
        try:
            losses.append(step(model, x).reduce_mean())
        except KeyError:
            losses.append(None)
    # Two microbatches a step: each ran once, up to the exception.
    assert calls == list(range(10))
    assert [loss is None for loss in losses] == [True, False, True, False, False]
    assert torch.equal(losses[1], losses[3])


def case_model_outside_a_step() -> None:
    model = smp.DistributedModel(Layers())
    expect(SMPError, r"@smp\.step", lambda: model(torch.ones(4, WIDTH)))
    expect(SMPError, r"@smp\.step", lambda: model.backward(torch.ones(())))
    train(model)
    expect(SMPError, r"@smp\.step", lambda: model(torch.ones(4, WIDTH)))


def case_optimizer_step_inside() -> None:
    model = smp.DistributedModel(Layers())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    expect(SMPError, "after the step function", lambda: train(model, lambda loss: optimizer.step()))


def case_nested_step() -> None:
    model = smp.DistributedModel(Layers())
    expect(SMPError, "inside another step", lambda: train(model, lambda loss: train(model)))


def case_a_failed_step_leaves_the_library_usable() -> None:
    model = smp.DistributedModel(Layers())
    expect(UnsupportedError, r"model\.backward", lambda: train(model, torch.Tensor.backward))
    assert train(model).isfinite()


def case_different_code() -> None:
    model = smp.DistributedModel(Layers())
    other = (lambda loss: model.backward(loss.exp())) if smp.rank() else model.backward
    expect(
        SMPError,
        "ranks of the pipeline recorded different computations",
        lambda: train(model, other),
    )


def case_keywords_in_any_order() -> None:
    @smp.step
    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model(x) * y).mean()
        model.backward(loss)
        return loss

    model = smp.DistributedModel(Layers())
    x, y = torch.randn(4, WIDTH), torch.randn(4, 1)
    expected = step(model, x, y).reduce_mean()
    assert torch.equal(step(model, y=y, x=x).reduce_mean(), expected)
    assert torch.equal(step(y=y, x=x, model=model).reduce_mean(), expected)
    # Each rank may write the call in its own way.
    named = {"y": y, "x": x} if smp.rank() else {"x": x, "y": y}
    assert torch.equal(step(model, **named).reduce_mean(), expected)


def case_an_uneven_batch_has_the_mean_of_one_process() -> None:
    net = Layers()
    x = torch.randn(5, WIDTH)
    expected = net(x).mean()
    model = smp.DistributedModel(net)
    torch.testing.assert_close(train(model, x=x), expected.detach(), atol=1e-6, rtol=1e-5)


def case_a_step_that_computes_nothing() -> None:
    model = smp.DistributedModel(Layers())
    assert smp.step(lambda model, x: 5)(model, torch.ones(4, WIDTH)) == [5, 5]
    output = smp.step(lambda model, x: x.sum())(model, torch.ones(4, WIDTH))
    assert output.reduce_sum() == 4 * WIDTH


def case_wrong_batch_sizes() -> None:
    @smp.step
    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model(x) * y).mean()
        model.backward(loss)
        return loss

    model = smp.DistributedModel(Layers())
    sizes = [torch.ones(4, WIDTH), torch.ones(3, WIDTH)]
    expect(ConfigError, "x has 4 along axis 0, y has 3", lambda: step(model, *sizes))
    none = torch.ones(0, WIDTH)
    expect(ConfigError, "empty", lambda: step(model, none, none))
    assert step(model, torch.ones(4, WIDTH), torch.ones(4, WIDTH)).reduce_mean().isfinite()


def case_backward_of_no_scalar() -> None:
    @smp.step
    def step(model: Any, x: torch.Tensor) -> None:
        model.backward(model(x))

    model = smp.DistributedModel(Layers())
    expect(RuntimeError, "scalar", lambda: step(model, torch.ones(4, WIDTH)))


def case_backward_of_a_constant() -> None:
    model = smp.DistributedModel(Layers())
    call = functools.partial(train, model, lambda loss: model.backward(loss.detach()))
    expect(UnsupportedError, "does not depend on any parameter", call)


def case_attached_outputs() -> None:
    step = smp.step(lambda model, x: model(x), detach_outputs=False)
    model = smp.DistributedModel(Layers())
    expect(UnsupportedError, "detach_outputs", lambda: step(model, torch.ones(4, WIDTH)))


def case_refused_on_the_first_rank_alone() -> None:
    def refuse(loss: torch.Tensor) -> None:
        if smp.rank() == 0:
            raise KeyError("planted")
        model.backward(loss)

    model = smp.DistributedModel(Layers())
    expect(KeyError, "planted", lambda: train(model, refuse))
    assert train(model).isfinite()


def case_decision_from_inputs_that_changes() -> None:
    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = model(x if x.sum() > 0 else -x)
        loss: torch.Tensor = out.mean()
        model.backward(loss)
        return loss

    model = smp.DistributedModel(Layers())
    one = step(model, torch.ones(4, WIDTH)).reduce_mean()
    other = step(model, -torch.ones(4, WIDTH)).reduce_mean()
    assert torch.equal(one, other)


@pytest.mark.parametrize("case", cases_of(globals()))
def test_case(worlds: Worlds, case: str) -> None:
    run(worlds, pipeline(2, 2, launcher="fork"), cases_of(globals())[case])


def differ(difference: str) -> None:
    # One that asks alone is waited for until the time is up.
    timeout = 8 if difference == "question of 0" else 20
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "communication_timeout": timeout})
    torch.manual_seed(0)
    model = smp.DistributedModel(Layers())
    train(model)
    if difference == "training" and smp.rank() == 1:
        model.eval()
    if difference.startswith("question"):
        asking = int(difference[-1])
        model = smp.DistributedModel(Layers(lambda x: x))
        train(model)
        model.get_module().between = lambda x: -x if smp.rank() == asking and x.sum() < 0 else x
        train(model)
    if difference.startswith("branch"):
        asking = int(difference[-1])

        @smp.step
        def step(model: Any, x: torch.Tensor) -> None:
            out = model(-x if smp.rank() == asking and x.sum() < 0 else x)
            model.backward(out.mean())

        step(model, torch.ones(4, WIDTH))
    elif difference == "arguments" and smp.rank() == 1:
        smp.step(lambda model, x, y: model(x + y))(model, torch.ones(4, WIDTH), torch.ones(4))
    elif difference == "a number":
        step = smp.step(lambda model, x, factor: model(x * factor))
        for number in range(3):
            factor = 2.0 if number == 2 and smp.rank() == 1 else 1.0
            step(model, torch.ones(4, WIDTH), factor)
    else:
        train(model)


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("training", "training flags"),
        ("arguments", "same structure"),
        # Also in a call like those before it.
        ("a number", "recorded different computations"),
        ("question of 0", "different|did not|failed"),
        ("question of 1", "did not make"),
        # In a microbatch of which nothing is known.
        ("branch of 0", "is not made here"),
        ("branch of 1", "did not make"),
    ],
)
def test_what_differs_between_ranks_is_named(difference: str, message: str) -> None:
    with pytest.raises(RanksFailedError, match=message) as raised:
        run_fresh(2, differ, difference)
    assert "rank 1" in str(raised.value)
    assert "no end within" not in str(raised.value)


class Averaging(nn.Linear):
    """Changes in place what the call before it multiplied with, and hides it from recordings."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.average = nn.Buffer(torch.zeros(sizes[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:
            self.average.mul_(0.9).add_(x.detach().flatten(0, -2).mean(0), alpha=0.1)
        return super().forward(x) + super().forward(self.average)


def average() -> None:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "communication_timeout": 20})
    model = Layers()
    model.layers[0] = Averaging(WIDTH, WIDTH)
    train(smp.DistributedModel(model))


def test_what_a_later_microbatch_changes_is_an_error_with_its_remedy() -> None:
    with pytest.raises(RanksFailedError, match=r"self.x = self.x \+ y"):
        run_fresh(2, average)


def run_together(first: int, stride: int) -> dict[str, int]:
    return together.population(first, stride)


@pytest.mark.parametrize(
    ("degree", "first", "stride"),
    [(2, 1, 16), *(pytest.param(each, 0, 1, marks=pytest.mark.slow) for each in (2, 4))],
)
def test_what_ranks_call_together_is_refused_where_one_runs_alone(
    worlds: Worlds, degree: int, first: int, stride: int
) -> None:
    world = pipeline(degree, 2, ddp=True)
    for found in run(worlds, world, run_together, first, stride, timeout=280):
        assert set(found) == {"right"}


class Bounded(nn.Linear):
    """Refuses large numbers, which only the rank that computes it has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if bool((x.abs() > 50).any()):
                raise ValueError("a number is too large")
        return super().forward(x)


def fails_within_a_step() -> None:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "communication_timeout": 60})
    model = smp.DistributedModel(nn.Sequential(*(Bounded(WIDTH, WIDTH) for _ in range(4))))
    train(model)
    x = torch.ones(4, WIDTH)
    x[3] = 1000
    with contextlib.suppress(ValueError):
        train(model, x=x)
    expect(SMPError, "no step can follow", lambda: train(model))
    smp.barrier()  # the other rank does not come


@pytest.mark.parametrize("launcher", ["fork", "smprun-fork"])
def test_who_waits_for_a_rank_whose_step_has_failed_learns_why(launcher: Any) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_fresh(2, fails_within_a_step, launcher=launcher)
    words = "the step has failed on rank 0: ValueError: a number is too large"
    assert words in caught.value.outcome.stderr
