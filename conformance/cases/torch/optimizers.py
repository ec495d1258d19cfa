"""PyTorch: the fused optimizers beside their formulas, with every option."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from conformance.adapters.base import Array
from conformance.registry import torch_case

_STEPS = 3
_SHAPES = ((3, 2), (4,))
Update = Callable[[dict[str, Any], Array, Array, int, dict[str, Any]], Array]


def _moments(
    state: dict[str, Any], gradient: Array, weight: float, options: dict[str, Any]
) -> tuple[Array, Array]:
    """Returns both moments of Adam after a gradient; the first one takes it with a weight."""
    beta1, beta2 = options["betas"]
    state["m"] = beta1 * state.get("m", 0) + weight * gradient
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * gradient**2
    return state["m"], state["v"]


def _corrections(step: int, options: dict[str, Any]) -> tuple[float, float]:
    if not options["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = options["betas"]
    return 1 - beta1**step, 1 - beta2**step


def adam(
    state: dict[str, Any], weights: Array, gradient: Array, step: int, options: dict[str, Any]
) -> Array:
    """Returns the weights after a step of Adam, or of AdamW."""
    decay = options["weight_decay"]
    if not options["adam_w_mode"]:
        gradient = gradient + decay * weights
    m, v = _moments(state, gradient, 1 - options["betas"][0], options)
    first, second = _corrections(step, options)
    update = (m / first) / (np.sqrt(v / second) + options["eps"])
    if options["adam_w_mode"]:
        update = update + decay * weights
    return weights - options["lr"] * update


def lamb(
    state: dict[str, Any], weights: Array, gradient: Array, step: int, options: dict[str, Any]
) -> Array:
    """Returns the weights after a step of LAMB."""
    decay = options["weight_decay"]
    if not options["adam_w_mode"]:
        gradient = gradient + decay * weights
    weight = 1 - options["betas"][0] if options["grad_averaging"] else 1.0
    m, v = _moments(state, gradient, weight, options)
    first, second = _corrections(step, options)
    update = (m / first) / (np.sqrt(v / second) + options["eps"])
    if options["adam_w_mode"]:
        update = update + decay * weights
    ratio = 1.0
    if decay or options["use_nvlamb"]:
        ratio = float(np.linalg.norm(weights) / np.linalg.norm(update))
    return weights - options["lr"] * ratio * update


def novograd(
    state: dict[str, Any], weights: Array, gradient: Array, step: int, options: dict[str, Any]
) -> Array:
    """Returns the weights after a step of NovoGrad."""
    beta1, beta2 = options["betas"]
    decay, is_euclidean = options["weight_decay"], options["norm_type"] == 2
    norm = float(np.linalg.norm(gradient)) if is_euclidean else float(np.abs(gradient).max())
    before = state.get("norm", 0.0 if options["init_zero"] else norm)
    if is_euclidean:
        state["norm"] = float(np.sqrt(beta2 * before**2 + (1 - beta2) * norm**2))
    else:
        state["norm"] = beta2 * before + (1 - beta2) * norm
    first, second = _corrections(step, options)
    scale = 1 / (state["norm"] / np.sqrt(second) + options["eps"])
    inside = options["reg_inside_moment"]
    if inside:
        gradient = gradient * scale + decay * weights
    weight = 1 - beta1 if options["grad_averaging"] else 1.0
    state["m"] = beta1 * state.get("m", 0) + weight * gradient
    update = state["m"] / first
    return weights - options["lr"] * (update if inside else update * scale + decay * weights)


def hold(adapter: Any, name: str, update: Update, options: dict[str, Any]) -> None:
    """Asserts that an optimizer does what the formula does."""
    import torch

    numbers = np.random.default_rng(4)
    arrays = [numbers.normal(size=shape) for shape in _SHAPES]
    parameters = [torch.nn.Parameter(torch.from_numpy(each.copy())) for each in arrays]
    optimizer = getattr(adapter.smp.optimizers, name)(parameters, **options)
    states: list[dict[str, Any]] = [{} for _ in arrays]
    for step in range(1, _STEPS + 1):
        gradients = [numbers.normal(size=shape) / 10 for shape in _SHAPES]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        arrays = [
            update(state, array, gradient, step, options)
            for state, array, gradient in zip(states, arrays, gradients, strict=True)
        ]
    for parameter, array in zip(parameters, arrays, strict=True):
        wanted = torch.from_numpy(array)
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-5, atol=1e-7)


def _choices(**values: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Returns every combination of some options, beside fixed ones that show."""
    fixed = {"lr": 0.05, "betas": (0.7, 0.8), "eps": 0.01, "weight_decay": 0.1}
    both = (True, False)
    every = {"bias_correction": both, **values}
    return [
        {**fixed, **dict(zip(every, chosen, strict=True))}
        for chosen in itertools.product(*every.values())
    ]


_BOTH = (True, False)


@torch_case("smp.optimizers.FusedAdam", worlds=("alone",))
def fused_adam_is_its_formula(adapter: Any) -> None:
    for options in _choices(adam_w_mode=_BOTH):
        hold(adapter, "FusedAdam", adam, options)


@torch_case("smp.optimizers.FusedLamb", worlds=("alone",))
def fused_lamb_is_its_formula(adapter: Any) -> None:
    for options in _choices(
        adam_w_mode=_BOTH,
        grad_averaging=_BOTH,
        use_nvlamb=_BOTH,
        max_grad_norm=(0.0,),
        weight_decay=(0.1, 0.0),
    ):
        hold(adapter, "FusedLamb", lamb, options)


@torch_case("smp.optimizers.FusedNovoGrad", worlds=("alone",))
def fused_novograd_is_its_formula(adapter: Any) -> None:
    for options in _choices(
        grad_averaging=_BOTH, norm_type=(2, 0), init_zero=_BOTH, reg_inside_moment=_BOTH
    ):
        hold(adapter, "FusedNovoGrad", novograd, options)


@torch_case("smp.optimizers.FusedAdam", "smp.optimizers.FusedLamb", worlds=("alone",))
def gradients_are_dropped_or_set_to_zero_as_asked(adapter: Any) -> None:
    import torch

    for name in ("FusedAdam", "FusedLamb", "FusedNovoGrad"):
        for drops in _BOTH:
            parameter = torch.nn.Parameter(torch.ones(2))
            parameter.grad = torch.ones(2)
            kind = getattr(adapter.smp.optimizers, name)
            kind([parameter], set_grad_none=drops).zero_grad()
            assert (parameter.grad is None) == drops
