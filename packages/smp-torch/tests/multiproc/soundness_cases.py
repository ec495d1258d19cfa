"""Cases in which Python state changes between the calls of a step: a stale replay would be wrong.

Each case changes the distributed model and a plain copy alike and compares every call.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from reference import MICROBATCHES, assert_close, empty, run_plain
from torch import nn
from torch.nn import functional as F
from world import Case, generator

import smdistributed.modelparallel.torch as smp

WIDTH = 8
SETTINGS = {"factor": 1.0}
factor_of_the_module = 1.0


class Stateful(nn.Module):
    """Four layers, and between them decisions and numbers that come from Python state."""

    factor_of_the_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c, self.d = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.factor = 1.0
        self.config = SimpleNamespace(factor=1.0)
        self.table = [1.0, 2.0]
        self.drop = 0.0
        self.counts = False
        self.calls = 0
        self.ramp: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.ramp is None:
            self.ramp = torch.arange(WIDTH) * 0.1
        x = self.a(x) * self.factor * self.config.factor * self.table[0]
        x = x * self.factor_of_the_class
        if self.counts:
            self.calls += 1
            x = x * (1.0 + self.calls % 2)
        if not (self.drop and random.random() < self.drop):
            x = torch.relu(self.b(x))
        return self.d(self.c(x) + self.ramp)


class Pair:
    """The distributed model and its plain copy."""

    def __init__(self, body: Callable[..., Any]) -> None:
        module = Stateful()
        self.plain = copy.deepcopy(module)
        self.model = smp.DistributedModel(module)
        self.body = body
        self.step = smp.step(body)
        self.generator = generator(3)

    def each(self) -> Iterator[Stateful]:
        yield self.model.get_module()
        yield self.plain

    def check(self) -> None:
        shape = (2 * MICROBATCHES, WIDTH)
        batch = [torch.randn(shape, generator=self.generator) for _ in range(2)]
        for module in self.each():
            module.zero_grad()
        random.seed(5)
        expected = run_plain(self.plain, self.body, batch)
        random.seed(5)
        got = self.step(self.model, *(batch if smp.pp_rank() == 0 else empty(batch)))
        assert_close(got.stack(), torch.stack([loss.detach() for loss in expected]), "loss")
        wanted = dict(self.plain.named_parameters())
        for name, parameter in self.model.local_named_parameters():
            other = wanted[name].grad
            if other is None:
                assert parameter.grad is None or not parameter.grad.any(), name
            else:
                assert_close(parameter.grad, other, name)


def regress(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), y)
    model.backward(loss)
    return loss


def _attribute(pair: Pair, value: float) -> None:
    for module in pair.each():
        module.factor = value


def _config(pair: Pair, value: float) -> None:
    for module in pair.each():
        module.config.factor = value


def _list_item(pair: Pair, value: float) -> None:
    for module in pair.each():
        module.table[0] = value


def _class_attribute(pair: Pair, value: float) -> None:
    Stateful.factor_of_the_class = value


def _attribute_over_class(pair: Pair, value: float) -> None:
    for module in pair.each():
        module.factor_of_the_class = value


def _hook(pair: Pair, value: float) -> None:
    for module in pair.each():
        module.register_forward_hook(lambda module, args, output: output * value)


def _frozen(pair: Pair, value: float) -> None:
    for module in pair.each():
        module.b.requires_grad_(value > 1)


def _rebound(pair: Pair, value: float) -> None:
    for module in pair.each():
        module.c.weight = nn.Parameter(torch.full((WIDTH, WIDTH), value))


def _swapped(pair: Pair, value: float) -> None:
    for module in pair.each():
        module.d = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        with torch.no_grad():
            module.d[0].weight.fill_(value)
            module.d[0].bias.fill_(value)


CHANGES = {
    "attribute": _attribute,
    "config": _config,
    "list_item": _list_item,
    "class_attribute": _class_attribute,
    "attribute_over_class": _attribute_over_class,
    "hook": _hook,
    "frozen": _frozen,
    "rebound": _rebound,
    "swapped": _swapped,
}


def _case_of(change: Callable[[Pair, float], None]) -> Case:
    def case() -> None:
        pair = Pair(regress)
        pair.check()
        pair.check()
        for value in (0.5, 1.5, 0.25):
            change(pair, value)
            pair.check()
            pair.check()
        Stateful.factor_of_the_class = 1.0

    return case


def case_closure() -> None:
    factor = 1.0

    def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y) * factor
        model.backward(loss)
        return loss

    pair = Pair(body)
    for factor in (1.0, 1.0, 0.5, 2.0):  # noqa: B007 - the closure reads it
        pair.check()


def case_globals() -> None:
    global factor_of_the_module

    def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y) * factor_of_the_module * SETTINGS["factor"]
        model.backward(loss)
        return loss

    pair = Pair(body)
    for value in (1.0, 0.5, 2.0, 1.0):
        factor_of_the_module = value
        pair.check()
        SETTINGS["factor"] = value
        pair.check()


def case_default() -> None:
    def body(model: Any, x: torch.Tensor, y: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        loss = F.mse_loss(model(x), y) * factor
        model.backward(loss)
        return loss

    pair = Pair(body)
    pair.check()
    body.__kwdefaults__["factor"] = 3.0
    pair.check()


def case_argument_object() -> None:
    def body(model: Any, x: torch.Tensor, y: torch.Tensor, settings: Any) -> torch.Tensor:
        loss = F.mse_loss(model(x), y) * settings.factor
        model.backward(loss)
        return loss

    pair = Pair(regress)
    step = smp.step(body)
    batch = [torch.randn(2 * MICROBATCHES, WIDTH) for _ in range(2)]
    losses = []
    settings = SimpleNamespace(factor=1.0)
    for value in (1.0, 3.0):
        settings.factor = value
        losses.append(step(pair.model, *batch, settings).reduce_mean())
    losses.append(step(pair.model, *batch, SimpleNamespace(factor=5.0)).reduce_mean())
    assert_close(losses[1], losses[0] * 3, "changed")
    assert_close(losses[2], losses[0] * 5, "another object")


class Sliced:
    """Knows how it is split, and holds a tensor and a number of each microbatch."""

    def __init__(self, tensor: torch.Tensor, factors: list[float]) -> None:
        self.tensor = tensor
        self.factors = factors

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Sliced:
        return Sliced(self.tensor.chunk(num_mb, axis)[mb], self.factors[mb::num_mb])


def case_objects_that_split_themselves() -> None:
    def body(model: Any, data: Sliced) -> torch.Tensor:
        loss = model(data.tensor).square().mean() * sum(data.factors)
        model.backward(loss)
        return loss

    pair = Pair(body)
    for step in range(3):
        x = torch.randn(2 * MICROBATCHES, WIDTH, generator=pair.generator)
        factors = [float(number + step) for number in range(2 * MICROBATCHES)]
        data = Sliced(x if smp.pp_rank() == 0 else torch.empty(len(x), 0), factors)
        losses = [
            pair.plain(part).square().mean() * sum(factors[m::MICROBATCHES])
            for m, part in enumerate(x.chunk(MICROBATCHES))
        ]
        assert_close(pair.step(pair.model, data).stack(), torch.stack(losses).detach(), "losses")


def case_two_models_of_one_class() -> None:
    first, second = Pair(regress), Pair(regress)
    second.step = first.step
    for pair in (first, second, first, second):
        pair.check()


def case_counter_in_forward() -> None:
    pair = Pair(regress)
    pair.check()
    for module in pair.each():
        module.counts = True
    for _ in range(3):
        pair.check()
    assert pair.model.get_module().calls == pair.plain.calls == 3 * MICROBATCHES


def case_layer_dropped_at_random() -> list[list[float]]:
    """Returns the losses: the layers that are dropped must be those of one process."""
    pair = Pair(regress)
    for module in pair.each():
        module.drop = 0.5
    x = torch.ones(2 * MICROBATCHES, WIDTH)
    # Python's generator may be in another state on every rank.
    random.seed(smp.rank())
    losses = [pair.step(pair.model, x, x).stack().tolist() for _ in range(4)]
    assert len({loss for step in losses for loss in step}) > 1
    return losses


def case_weights_tied_after_wrapping() -> None:
    pair = Pair(regress)
    for module in pair.each():
        module.d.weight = module.a.weight
    pair.check()
    pair.check()


def case_numbers_of_activations() -> None:
    log = []

    def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = model(x)
        loss = F.mse_loss(out, y) / (1.0 + out.mean().item())
        model.backward(loss)
        log.append(loss.item())
        return loss, {"loss": loss.item(), "double": 2 * loss.item() + out.mean().item()}

    pair = Pair(regress)
    step = smp.step(body)
    for _ in range(2):
        batch = [torch.randn(2 * MICROBATCHES, WIDTH) for _ in range(2)]
        for module in pair.each():
            module.zero_grad()
        log.clear()
        expected = run_plain(pair.plain, body, batch)
        wanted = [float(each) for each in log]
        log.clear()
        loss, numbers = step(pair.model, *(batch if smp.pp_rank() == 0 else empty(batch)))
        assert_close(torch.tensor([float(each) for each in log]), torch.tensor(wanted), "log")
        assert_close(torch.tensor(numbers["loss"]), torch.tensor(wanted), "number")
        doubles = [one[1]["double"] for one in expected]
        assert_close(torch.tensor(numbers["double"]), torch.tensor(doubles), "computed")
        assert_close(loss.stack(), torch.stack([one[0].detach() for one in expected]), "loss")
        gradients = {name: each.grad for name, each in pair.plain.named_parameters()}
        for name, parameter in pair.model.local_named_parameters():
            assert_close(parameter.grad, gradients[name], name)


def case_evaluation_between() -> None:
    pair = Pair(regress)

    @smp.step
    def evaluate(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x)

    for value in (1.0, 2.0):
        for module in pair.each():
            module.factor = value
        pair.check()
        x = torch.randn(2 * MICROBATCHES, WIDTH)
        with torch.no_grad():
            assert_close(evaluate(pair.model, x).concat(), pair.plain(x), "evaluation")
        pair.check()


def cases() -> dict[str, Case]:
    """Every case of this module by name."""
    prefix = "case_"
    own = {
        name.removeprefix(prefix): function
        for name, function in globals().items()
        if name.startswith(prefix)
    }
    return own | {f"changed_{name}": _case_of(change) for name, change in CHANGES.items()}
