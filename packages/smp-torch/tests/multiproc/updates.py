"""Ways to update parameters, by optimizers and by hand: each is as of plain PyTorch, or refused.

With half precision, sharded state, shards, slices and pipelines a rank has a part of the parameters
or of their gradients. A way that knows nothing of that must not do another thing silently.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from reference import own_share, run_plain
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError

STEPS = 3
Parameters = list[nn.Parameter]
Wrap = Callable[[Any], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.last = nn.Linear(6, 4)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(states))


def body(model: Any, states: torch.Tensor) -> torch.Tensor:
    loss = model(states).square().mean()
    model.backward(loss)
    return loss.detach()


class Own(torch.optim.Optimizer):
    """Of a script: each number by itself."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **options})

    def factor(self) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        factor = self.factor()
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.add_(each.grad * factor, alpha=-group["lr"])


class OfAll(Own):
    """By the norm of all gradients."""

    def factor(self) -> Any:
        found = [
            each.grad.norm()
            for group in self.param_groups
            for each in group["params"]
            if each.grad is not None
        ]
        return 1 / (1 + torch.stack(found).norm())


class Around(torch.optim.Optimizer):
    """Steps another one, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        self.state = inner.state
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Assigning(Own):
    """Gives parameters other memory, and keeps how large their gradients were."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    size = self.state[each].setdefault("size", torch.zeros(len(each)))
                    size.add_(each.grad.flatten(1).norm(dim=1) if each.dim() > 1 else each.grad)
                    each.data = each.data - group["lr"] * each.grad / (1 + each.data.norm())
                    each.grad = None


class Sharp(torch.optim.Optimizer):
    """Climbs along all gradients, comes back, and has another one descend."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def _trained(self) -> list[Any]:
        every = [each for group in self.param_groups for each in group["params"]]
        return [each for each in every if each.grad is not None]

    @torch.no_grad()
    def climb(self) -> None:
        norm = torch.stack([each.grad.norm() for each in self._trained()]).norm()
        for each in self._trained():
            self.state[each]["before"] = each.data.clone()
            each.add_(each.grad * (0.05 / norm))

    @torch.no_grad()
    def descend(self) -> None:
        for each in self._trained():
            each.data = self.state[each]["before"]
        self.inner.step()

    def step(self, closure: Any = None) -> None:
        self.climb()
        self.descend()


class Slow(torch.optim.Optimizer):
    """Looks ahead: slow weights follow those of another one every second update."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.AdamW(parameters, lr=0.05)
        super().__init__(self.inner.param_groups, {})
        self.updates = 0

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.updates += 1
        for group in self.param_groups:
            for each in group["params"]:
                slow = self.state[each].setdefault("slow", each.detach().clone())
                if self.updates % 2 == 0:
                    slow.lerp_(each.detach(), 0.5)
                    each.data.copy_(slow)


class Way:
    """A way to update; what it computes beside the parameters is in ``seen``."""

    def __init__(self, parameters: Parameters, wrap: Wrap) -> None:
        self.parameters = parameters
        self.seen: list[float] = []
        self.optimizer = wrap(self.made())

    def made(self) -> Any:
        return torch.optim.SGD(self.parameters, lr=0.1)

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def before(self) -> None:
        """What is done with gradients."""

    def update(self) -> None:
        self.before()
        self.optimizer.step()


def of(kind: Any, **options: Any) -> type[Way]:
    class OfTorch(Way):
        def made(self) -> Any:
            return kind(self.parameters, **options)

    return OfTorch


def after(change: Callable[[Way], Any]) -> type[Way]:
    class Changed(Way):
        def before(self) -> None:
            with torch.no_grad():
                change(self)

    return Changed


def by_hand(change: Callable[[Way], Any]) -> type[Way]:
    class ByHand(Way):
        def made(self) -> None:
            return None

        def clear(self) -> None:
            for each in self.parameters:
                each.grad = None

        def update(self) -> None:
            with torch.no_grad():
                change(self)

    return ByHand


class Scheduled(Way):
    def __init__(self, parameters: Parameters, wrap: Wrap) -> None:
        super().__init__(parameters, wrap)
        self._schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def update(self) -> None:
        super().update()
        self._schedule.step()


class InGroups(Way):
    def made(self) -> Any:
        first, *others = self.parameters
        return torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": others}], lr=0.01)


class Accumulated(Way):
    def clear(self) -> None:
        """Gradients of all steps are added up."""


class Zeroed(Way):
    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)


class ByScaler(Way):
    def __init__(self, parameters: Parameters, wrap: Wrap) -> None:
        super().__init__(parameters, wrap)
        self._scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=1.0)

    def update(self) -> None:
        self._scaler.scale(torch.ones(()))
        self._scaler.unscale_(self.optimizer)
        self._scaler.step(self.optimizer)
        self._scaler.update()


class ByClosure(Way):
    def update(self) -> None:
        self.optimizer.step(lambda: torch.zeros(()))


class Averaged(Way):
    def __init__(self, parameters: Parameters, wrap: Wrap) -> None:
        super().__init__(parameters, wrap)
        self._means = [torch.zeros(each.shape) for each in parameters]

    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for mean, each in zip(self._means, self.parameters, strict=True):
                mean.lerp_(each.float(), 0.5)
        self.seen.append(float(sum(mean.sum() for mean in self._means)))


class Searching(ByClosure):
    def made(self) -> Any:
        return torch.optim.LBFGS(self.parameters, lr=0.1, max_iter=2)


class OfMatrices(Way):
    def made(self) -> Any:
        return torch.optim.Muon([each for each in self.parameters if each.dim() == 2], lr=0.05)


class InTwoCalls(Way):
    def made(self) -> Any:
        return Sharp(self.parameters)

    def update(self) -> None:
        self.optimizer.climb()
        self.optimizer.descend()


def clip_by_hand(way: Way) -> None:
    norm = torch.stack([each.grad.norm() for each in way.parameters]).norm()
    for each in way.parameters:
        each.grad.mul_(torch.clamp(0.1 / (norm + 1e-6), max=1.0))


def clip_if_there(way: Way) -> None:
    found = [each.grad for each in way.parameters if each.grad is not None]
    norm = math.sqrt(sum(float(each.square().sum()) for each in found))
    for each in found:
        each.mul_(min(0.1 / norm, 1.0))


def total_norm(way: Way) -> None:
    found = [each.grad for each in way.parameters if each.grad is not None]
    way.seen.append(float(torch.nn.utils.get_total_norm(found)))


def note_norms(way: Way) -> None:
    way.seen.append(sum(float(each.grad.norm()) for each in way.parameters))


def each_gradient(change: Callable[[Any, Any], Any]) -> type[Way]:
    def run(way: Way) -> None:
        for each in way.parameters:
            change(each, each.grad)

    return after(run)


def each_by_hand(change: Callable[[Any, Any], Any]) -> type[Way]:
    def run(way: Way) -> None:
        for each in way.parameters:
            if each.grad is not None:
                change(each, each.grad)

    return by_hand(run)


def many_by_hand(way: Way) -> None:
    found = [each for each in way.parameters if each.grad is not None]
    torch._foreach_add_(found, [each.grad for each in found], alpha=-0.1)


def data_by_hand(parameter: Any, gradient: Any) -> None:
    parameter.data -= 0.1 * gradient.data


def by_assignment(parameter: Any, gradient: Any) -> None:
    parameter.data = parameter.data - 0.1 * gradient


def replaced_gradients(way: Way) -> None:
    for each in way.parameters:
        each.grad = each.grad * 0.5


optim = torch.optim
WAYS: dict[str, type[Way]] = {
    "SGD": Way,
    "SGD, foreach": of(optim.SGD, lr=0.1, foreach=True),
    "SGD, one by one": of(optim.SGD, lr=0.1, foreach=False),
    "SGD, fused": of(optim.SGD, lr=0.1, fused=True),
    "momentum": of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": of(optim.Adam, lr=0.05),
    "AdamW, fused": of(optim.AdamW, lr=0.05, fused=True),
    "Adagrad": of(optim.Adagrad, lr=0.05),
    "Adadelta": of(optim.Adadelta),
    "Adamax": of(optim.Adamax, lr=0.05),
    "NAdam": of(optim.NAdam, lr=0.05),
    "RAdam": of(optim.RAdam, lr=0.05),
    "RMSprop": of(optim.RMSprop, lr=0.05),
    "Rprop": of(optim.Rprop, lr=0.05),
    "ASGD": of(optim.ASGD, lr=0.05),
    "own": of(Own),
    "of all gradients": of(OfAll),
    "around another": of(lambda parameters: Around(optim.SGD(parameters, lr=0.1))),
    "Adafactor": of(optim.Adafactor, lr=0.05),
    **({"Muon": OfMatrices} if hasattr(optim, "Muon") else {}),
    "LBFGS": Searching,
    "assigning": of(Assigning),
    "sharp": of(Sharp),
    "sharp, in two calls": InTwoCalls,
    "slow": of(Slow),
    "scheduled": Scheduled,
    "in groups": InGroups,
    "added up": Accumulated,
    "zeroed": Zeroed,
    "scaler": ByScaler,
    "closure": ByClosure,
    "averages": Averaged,
    "clip_grad_norm_": after(lambda way: nn.utils.clip_grad_norm_(way.parameters, 0.1)),
    "clip_grad_value_": after(lambda way: nn.utils.clip_grad_value_(way.parameters, 0.01)),
    "clipped by hand": after(clip_by_hand),
    "clipped where there are some": after(clip_if_there),
    "total norm": after(total_norm),
    "norms": after(note_norms),
    "halved": each_gradient(lambda parameter, gradient: gradient.mul_(0.5)),
    "decayed": each_gradient(lambda parameter, gradient: gradient.add_(parameter, alpha=0.1)),
    "centered": each_gradient(lambda parameter, gradient: gradient.sub_(gradient.mean())),
    "signs": each_gradient(lambda parameter, gradient: gradient.sign_()),
    "replaced gradients": after(replaced_gradients),
    "by hand": each_by_hand(lambda parameter, gradient: parameter.sub_(0.1 * gradient)),
    "by hand, alpha": each_by_hand(
        lambda parameter, gradient: parameter.add_(gradient, alpha=-0.1)
    ),
    "by hand, data": each_by_hand(data_by_hand),
    "by hand, assigned": each_by_hand(by_assignment),
    "by hand, copied": each_by_hand(
        lambda parameter, gradient: parameter.copy_(parameter - 0.1 * gradient)
    ),
    "by hand, signs": each_by_hand(
        lambda parameter, gradient: parameter.add_(gradient.sign(), alpha=-0.01)
    ),
    "by hand, many": by_hand(many_by_hand),
}


class Plain:
    def __init__(self, module: nn.Module, way: type[Way]) -> None:
        self._module = module
        self.way = way(list(module.parameters()), self._clipping)

    def _clipping(self, optimizer: Any) -> Any:
        """Has an optimizer clip as that of a model in shards does."""
        bound = smp.state.cfg.sdp_gradient_clipping

        def clip(*_: Any) -> None:
            nn.utils.clip_grad_norm_(self._module.parameters(), bound)

        if optimizer and smp.state.cfg.sharded_data_parallel_degree > 1:
            optimizer.register_step_pre_hook(clip)
        return optimizer

    def step(self, states: torch.Tensor) -> None:
        self.way.clear()
        run_plain(self._module, body, [states])
        self.way.update()

    def state(self) -> dict[str, torch.Tensor]:
        return self._module.state_dict()


class Split:
    def __init__(self, module: nn.Module, way: type[Way], wrap: Wrap) -> None:
        with smp.tensor_parallelism():
            self._model = smp.DistributedModel(copy.deepcopy(module))
        self._train = smp.step(body)
        self.way = way(list(self._model.parameters()), wrap)

    def step(self, states: torch.Tensor) -> None:
        self.way.clear()
        self._train(self._model, *own_share([states], [0]))
        self.way.update()

    def state(self) -> dict[str, torch.Tensor]:
        return self._model.state_dict()


def outcome(name: str, *, is_wrapped: bool) -> tuple[str, str]:
    """Returns what became of some steps by a way, and what was said."""
    torch.manual_seed(3)
    net, way = Net(), WAYS[name]
    try:
        wrap = smp.DistributedOptimizer if is_wrapped else lambda optimizer: optimizer
        split = Split(net, way, lambda optimizer: optimizer and wrap(optimizer))
        plain = Plain(net, way)
        for _ in range(STEPS):
            states = torch.randn(2 * smp.state.cfg.microbatches * smp.dp_size(), 4)
            for each in (split, plain):
                each.step(states)
        got, want = split.state(), plain.state()
    except SMPError as error:
        return "refused", str(error)
    except Exception as error:
        # PyTorch refuses it by itself for parameters in half precision.
        is_told = "unscale FP16 gradients" in str(error)
        return "refused" if is_told else "unclear", f"{type(error).__name__}: {error}"
    tolerance = 3e-2 if smp.state.cfg.fp16 or smp.state.cfg.bf16 else 1e-5
    is_exact = all(
        torch.allclose(got[key].cpu().float(), value.cpu(), atol=tolerance, rtol=tolerance)
        for key, value in want.items()
    )
    seen = [torch.tensor(each.way.seen) for each in (split, plain)]
    is_exact = is_exact and torch.allclose(*seen, atol=tolerance, rtol=tolerance)
    return "exact" if is_exact else "wrong", ""


def population(names: Sequence[str] | None = None) -> dict[str, Any]:
    """Tries ways, wrapped and not; returns how many came to which end, and what was told."""
    counts: Counter[str] = Counter()
    told = {}
    for name, is_wrapped in itertools.product(names or WAYS, (True, False)):
        end, said = outcome(name, is_wrapped=is_wrapped)
        counts[end] += 1
        if end != "exact":
            told[f"{name}, {'wrapped' if is_wrapped else 'plain'}"] = (end, said[:300])
    return {"counts": dict(counts), "told": told}
