"""Ways to differentiate in the body of a step with one partition: each is as ``model.backward``.

Each way stands beside what it means by ``backward`` of a model, which a plain loop over
microbatches and replicas runs. It is exact or refused.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from reference import MICROBATCHES, own_share, run_plain
from torch import nn
from torch.autograd import backward as backward_by_name
from torch.utils.checkpoint import checkpoint

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError

Way = Callable[[Any, torch.Tensor], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.is_checkpointed = False

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.is_checkpointed:
            return checkpoint(self.layers, states.requires_grad_(), use_reentrant=True)
        return self.layers(states)


def losses(model: Any, states: torch.Tensor) -> torch.Tensor:
    return model(states).square().sum(1)


def loss_of(model: Any, states: torch.Tensor) -> torch.Tensor:
    return losses(model, states).mean()


def with_penalty(model: Any, states: torch.Tensor) -> torch.Tensor:
    states = states.clone().requires_grad_()
    (slope,) = torch.autograd.grad(losses(model, states).sum(), states, create_graph=True)
    return loss_of(model, states) + slope.norm(dim=1).mean()


def with_weight_penalty(model: Any, states: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, states)
    weight = next(iter(module_of(model).parameters()))
    (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
    return loss + slope.square().mean()


def module_of(model: Any) -> Any:
    return model.get_module() if hasattr(model, "get_module") else model.module


class Accelerator:
    """As trainers wrap it."""

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        (loss / 1).backward(**options)


def adversarial(model: Any, states: torch.Tensor, run: Callable[[Any], Any]) -> None:
    states = states.clone().requires_grad_()
    run(loss_of(model, states))
    assert states.grad is not None
    run(loss_of(model, states.detach() + 0.1 * states.grad.sign()))


def doubled(model: Any, states: torch.Tensor, run: Callable[..., Any]) -> None:
    loss = loss_of(model, states)
    run(loss, retain_graph=True)
    run(loss)


def reentrant(model: Any, states: torch.Tensor, run: Callable[[Any], Any]) -> None:
    module_of(model).is_checkpointed = True
    run(loss_of(model, states.clone()))
    module_of(model).is_checkpointed = False


def scaled(model: Any, states: torch.Tensor, run: Callable[[Any], Any]) -> None:
    run(SCALER.scale(loss_of(model, states)))


def run_loss(loss: torch.Tensor, **options: Any) -> None:
    loss.backward(**options)


SCALER = torch.amp.GradScaler("cpu", init_scale=4.0)


def set_by_hand(model: Any, states: torch.Tensor) -> None:
    parameters = list(module_of(model).parameters())
    for each, gradient in zip(
        parameters, torch.autograd.grad(loss_of(model, states), parameters), strict=True
    ):
        each.grad = gradient


def set_by_transform(model: Any, states: torch.Tensor) -> None:
    module = module_of(model)
    named = dict(module.named_parameters())
    states = states.to(next(iter(named.values())).dtype)  # past the model, which would cast them

    def loss(values: Any) -> torch.Tensor:
        return torch.func.functional_call(module, values, (states,)).square().sum(1).mean()

    for name, gradient in torch.func.grad(loss)(named).items():
        named[name].grad = gradient


def of_inputs(model: Any, states: torch.Tensor, run: Callable[..., Any]) -> None:
    run(loss_of(model, states), inputs=list(module_of(model).parameters()))


#: Each with what it means.
WAYS: dict[str, tuple[Way, Way]] = {
    name: (way, meaning or (lambda model, states: model.backward(loss_of(model, states))))
    for name, (way, meaning) in {
        "model": (lambda m, x: m.backward(loss_of(m, x)), None),
        "loss": (lambda m, x: loss_of(m, x).backward(), None),
        "autograd": (lambda m, x: torch.autograd.backward(loss_of(m, x)), None),
        "by name": (lambda m, x: backward_by_name(loss_of(m, x)), None),
        "list": (
            lambda m, x: torch.autograd.backward([loss_of(m, x), losses(m, x).sum()]),
            lambda m, x: m.backward([loss_of(m, x), losses(m, x).sum()], [None, None]),
        ),
        "sum": (
            lambda m, x: losses(m, x).sum().backward(),
            lambda m, x: m.backward(losses(m, x).sum()),
        ),
        "started": (
            lambda m, x: losses(m, x).backward(torch.ones(len(x)) / len(x)),
            None,
        ),
        "accelerator": (lambda m, x: Accelerator().backward(loss_of(m, x)), None),
        "scaler": (
            lambda m, x: scaled(m, x, run_loss),
            lambda m, x: scaled(m, x, m.backward),
        ),
        "inputs": (lambda m, x: of_inputs(m, x, run_loss), None),
        "twice": (
            lambda m, x: doubled(m, x, run_loss),
            lambda m, x: (m.backward(loss_of(m, x)), m.backward(loss_of(m, x))),
        ),
        "two losses": (
            lambda m, x: (loss_of(m, x).backward(), losses(m, x).max().backward()),
            lambda m, x: (m.backward(loss_of(m, x)), m.backward(losses(m, x).max())),
        ),
        "mixed": (
            lambda m, x: (m.backward(loss_of(m, x)), losses(m, x).max().backward()),
            lambda m, x: (m.backward(loss_of(m, x)), m.backward(losses(m, x).max())),
        ),
        "adversarial": (
            lambda m, x: adversarial(m, x, run_loss),
            lambda m, x: adversarial(m, x, m.backward),
        ),
        "penalty": (
            lambda m, x: with_penalty(m, x).backward(),
            lambda m, x: m.backward(with_penalty(m, x)),
        ),
        "penalty, by model": (
            lambda m, x: m.backward(with_penalty(m, x)),
            lambda m, x: m.backward(with_penalty(m, x)),
        ),
        "penalty on slopes of weights": (
            lambda m, x: with_weight_penalty(m, x).backward(),
            lambda m, x: m.backward(with_weight_penalty(m, x)),
        ),
        "reentrant": (
            lambda m, x: reentrant(m, x, run_loss),
            None,
        ),
        "graph": (lambda m, x: loss_of(m, x).backward(create_graph=True), None),
        "set by hand": (set_by_hand, None),
        "set by a transform": (set_by_transform, None),
    }.items()
}


class Plain:
    """What a way means, on one process."""

    def __init__(self, module: nn.Module, meaning: Way) -> None:
        self._module, self._meaning = module, meaning
        self._optimizer = torch.optim.SGD(module.parameters(), lr=0.5)

    def step(self, states: torch.Tensor) -> None:
        self._optimizer.zero_grad()
        run_plain(self._module, self._meaning, [states])
        if smp.state.cfg.sharded_data_parallel_degree > 1:
            bound = smp.state.cfg.sdp_gradient_clipping
            nn.utils.clip_grad_norm_(self._module.parameters(), bound)
        self._optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        return self._module.state_dict()


class Split:
    """A way, or what it means, by the library."""

    def __init__(self, module: nn.Module, way: Way) -> None:
        with smp.tensor_parallelism():
            self._model = smp.DistributedModel(copy.deepcopy(module))
        self._optimizer = smp.DistributedOptimizer(
            torch.optim.SGD(self._model.parameters(), lr=0.5)
        )

        @smp.step
        def train(model: Any, states: torch.Tensor) -> None:
            way(model, states)

        self._train = train

    def step(self, states: torch.Tensor) -> None:
        self._optimizer.zero_grad()
        self._train(self._model, *own_share([states], [0]))
        self._optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        return self._model.state_dict()


def trained(training: Plain | Split) -> dict[str, torch.Tensor]:
    """Returns the state after three steps."""
    torch.manual_seed(5)
    # Before any step, which draws a seed.
    for states in torch.randn(3, 2 * MICROBATCHES * smp.dp_size(), 4):
        training.step(states)
    return {name: value.detach().clone() for name, value in training.state().items()}


def outcome(way: str, num_models: int = 1) -> tuple[str, str]:
    """Returns what became of three steps by one way, and what was said.

    Args:
        way: of differentiating.
        num_models: that live; the others are not trained.
    """
    theirs, meaning = WAYS[way]
    torch.manual_seed(3)
    net = Net()
    others = [smp.DistributedModel(Net()) for _ in range(num_models - 1)]
    is_half = smp.state.cfg.fp16 or smp.state.cfg.bf16
    try:
        # One after the other: only one of them lives while losses are differentiated.
        want = trained((Split if is_half else Plain)(copy.deepcopy(net), meaning))
        got = trained(Split(net, theirs))
    except SMPError as error:
        return "refused", str(error)
    except Exception as error:
        return "unclear", f"{type(error).__name__}: {error}"
    finally:
        del others
    tolerance = 2e-2 if is_half else 1e-5
    is_exact = all(
        torch.allclose(got[name].cpu(), value.cpu(), atol=tolerance, rtol=1e-4)
        for name, value in want.items()
    )
    return "exact" if is_exact else "wrong", ""


def population(ways: list[str] | None = None, num_models: int = 1) -> dict[str, Any]:
    """Tries ways; returns how many came to which end, and which were not exact."""
    counts: Counter[str] = Counter()
    told = {}
    for way in ways or WAYS:
        end, said = outcome(way, num_models)
        counts[end] += 1
        if end != "exact":
            told[way] = (end, said[:300])
    return {"counts": dict(counts), "told": told}
