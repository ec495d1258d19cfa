"""Mistakes in a script must be clear errors, on every rank, not hangs or wrong numbers."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from world import pipeline, run, run_fresh

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import ConfigError, SMPError, UnsupportedError
from smdistributed.modelparallel.common.testing import RanksFailedError, Worlds, cases_of

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


def case_branch_on_an_activation() -> None:
    model = smp.DistributedModel(Layers(lambda x: x if x.sum() > 0 else -x))
    expect(UnsupportedError, "depend on the value of an activation", lambda: train(model))


def case_branch_on_the_item_of_an_activation() -> None:
    model = smp.DistributedModel(Layers(lambda x: x if x.mean().item() > 0 else -x))
    expect(UnsupportedError, r"\.item\(\)", lambda: train(model))


def case_data_dependent_shape() -> None:
    model = smp.DistributedModel(Layers(lambda x: x[x[:, 0] > 0]))
    expect(UnsupportedError, "shape", lambda: train(model))


def _hooked(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return x


def _with_other_data(x: torch.Tensor) -> torch.Tensor:
    x.data = x.data * 2
    return x


def case_what_would_do_nothing_between_partitions() -> None:
    for between, text in ((_hooked, "register_hook"), (_with_other_data, "data")):
        model = smp.DistributedModel(Layers(between))
        expect(UnsupportedError, text, lambda model=model: train(model))  # type: ignore[misc]
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
    model = smp.DistributedModel(Layers())
    train(model)
    for call in (copy.deepcopy, pickle.dumps):
        expect(UnsupportedError, "state_dict", functools.partial(call, model))


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


def case_wrong_batch_sizes() -> None:
    @smp.step
    def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model(x) * y).mean()
        model.backward(loss)
        return loss

    model = smp.DistributedModel(Layers())
    sizes = [torch.ones(4, WIDTH), torch.ones(3, WIDTH)]
    expect(ConfigError, "x has 4 along axis 0, y has 3", lambda: step(model, *sizes))
    one = torch.ones(1, WIDTH)
    expect(ConfigError, r"smaller than microbatches \(2\)", lambda: step(model, one, one))
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
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "communication_timeout": 20})
    torch.manual_seed(0)
    model = smp.DistributedModel(Layers())
    train(model)
    if difference == "training" and smp.rank() == 1:
        model.eval()
    if difference == "arguments" and smp.rank() == 1:
        smp.step(lambda model, x, y: model(x + y))(model, torch.ones(4, WIDTH), torch.ones(4))
    else:
        train(model)


@pytest.mark.parametrize(
    ("difference", "message"),
    [("training", "training flags"), ("arguments", "same structure")],
)
def test_what_differs_between_ranks_is_named(difference: str, message: str) -> None:
    with pytest.raises(RanksFailedError, match=message) as raised:
        run_fresh(2, differ, difference)
    assert "rank 1" in str(raised.value)
    assert "no end within" not in str(raised.value)
