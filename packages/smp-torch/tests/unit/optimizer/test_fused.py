"""The fused optimizers and layers against torch's own, or their definition in plain numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

STEPS = 4


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    given = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((4, 3), (5,), (2, 2))]
    return [*given, nn.Parameter(torch.zeros(3, dtype=dtype))]


def train(optimizer: torch.optim.Optimizer, given: list[nn.Parameter]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for parameter in given[:-1]:  # the last one never has a gradient
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
    return [each.detach().clone() for each in given]


def assert_alike(made: Callable[[Any], Any], plain: Callable[[Any], Any]) -> None:
    given, others = parameters(), parameters()
    for one, other in zip(train(made(given), given), train(plain(others), others), strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_torchs(decay: float) -> None:
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": decay}
    assert_alike(
        lambda p: smp.optimizers.FusedAdam(p, **options), lambda p: torch.optim.AdamW(p, **options)
    )
    assert_alike(
        lambda p: smp.optimizers.FusedAdam(p, adam_w_mode=False, **options),
        lambda p: torch.optim.Adam(p, **options),
    )


class Plainly(torch.optim.Optimizer):
    """An optimizer of one formula: state, parameter, gradient, number of the step -> update."""

    def __init__(self, params: Any, formula: Callable[..., torch.Tensor], limit: float = 0) -> None:
        super().__init__(params, {})
        self.formula, self.limit = formula, limit
        self.number = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.number += 1
        (group,) = self.param_groups
        given = [each for each in group["params"] if each.grad is not None]
        norm = math.sqrt(sum(float(each.grad.square().sum()) for each in given))
        scale = min(1.0, self.limit / norm) if self.limit else 1.0
        for each in given:
            each -= self.formula(self.state[each], each, each.grad * scale, self.number)


def test_adam_without_bias_correction() -> None:
    def formula(state: Any, p: torch.Tensor, g: torch.Tensor, step: int) -> torch.Tensor:
        state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
        state["v"] = 0.99 * state.get("v", 0) + 0.01 * g * g
        update: torch.Tensor = state["m"] / (state["v"].sqrt() + 1e-8) + 0.1 * p
        return 0.1 * update

    assert_alike(
        lambda p: smp.optimizers.FusedAdam(
            p, 0.1, bias_correction=False, betas=(0.9, 0.99), weight_decay=0.1
        ),
        lambda p: Plainly(p, formula),
    )


@pytest.mark.parametrize("is_decoupled", [True, False])
@pytest.mark.parametrize("averages", [True, False])
@pytest.mark.parametrize(("decay", "everywhere"), [(0.1, False), (0.0, False), (0.0, True)])
def test_lamb(is_decoupled: bool, averages: bool, decay: float, everywhere: bool) -> None:
    def formula(state: Any, p: torch.Tensor, g: torch.Tensor, step: int) -> torch.Tensor:
        g = g if is_decoupled else g + decay * p
        state["m"] = 0.9 * state.get("m", 0) + (0.1 if averages else 1) * g
        state["v"] = 0.99 * state.get("v", 0) + 0.01 * g * g
        update = (state["m"] / (1 - 0.9**step)) / ((state["v"] / (1 - 0.99**step)).sqrt() + 1e-6)
        update = update + decay * p * is_decoupled
        ratio = p.norm() / update.norm() if decay or everywhere else 1.0
        result: torch.Tensor = 0.1 * ratio * update
        return result

    assert_alike(
        lambda p: smp.optimizers.FusedLamb(
            p,
            0.1,
            betas=(0.9, 0.99),
            weight_decay=decay,
            adam_w_mode=is_decoupled,
            grad_averaging=averages,
            max_grad_norm=0.5,
            use_nvlamb=everywhere,
        ),
        lambda p: Plainly(p, formula, limit=0.5),
    )


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("norm_type", [2, 0])
@pytest.mark.parametrize("from_zero", [True, False])
def test_novograd(inside: bool, norm_type: int, from_zero: bool) -> None:
    def formula(state: Any, p: torch.Tensor, g: torch.Tensor, step: int) -> torch.Tensor:
        norm = g.norm() if norm_type == 2 else g.abs().max()
        before = state.get("v", torch.zeros(()) if from_zero else norm)
        state["v"] = (
            (0.99 * before**2 + 0.01 * norm**2).sqrt()
            if norm_type == 2
            else 0.99 * before + 0.01 * norm
        )
        scale = 1 / (state["v"] / math.sqrt(1 - 0.99**step) + 1e-8)
        moved = g * scale + 0.1 * p if inside else g
        state["m"] = 0.9 * state.get("m", 0) + 0.1 * moved
        update = state["m"] / (1 - 0.9**step)
        result: torch.Tensor = 0.1 * (update if inside else update * scale + 0.1 * p)
        return result

    assert_alike(
        lambda p: smp.optimizers.FusedNovoGrad(
            p,
            0.1,
            betas=(0.9, 0.99),
            weight_decay=0.1,
            reg_inside_moment=inside,
            norm_type=norm_type,
            init_zero=from_zero,
        ),
        lambda p: Plainly(p, formula),
    )


OPTIMIZERS = [
    smp.optimizers.FusedAdam,
    smp.optimizers.FusedLamb,
    smp.optimizers.FusedLAMB,
    smp.optimizers.FusedNovoGrad,
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_states_are_loaded_and_copied(kind: Any) -> None:
    given = parameters()
    optimizer = kind(given, lr=0.1)
    train(optimizer, given)
    others = copy.deepcopy(given)
    restored = kind(others, lr=0.5)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, other in zip(train(optimizer, given), train(restored, others), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("counts", ["as a number", "by group"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_counted_in_another_way_are_loaded(kind: Any, counts: str) -> None:
    given = parameters()
    optimizer = kind(given, lr=0.1)
    train(optimizer, given)
    others, state = copy.deepcopy(given), copy.deepcopy(optimizer.state_dict())
    for own in state["state"].values():
        steps = int(own.pop("step"))
        if counts == "as a number":
            own["step"] = steps
    if counts == "by group":
        state["param_groups"][0]["step"] = steps
    restored = kind(others, lr=0.5)
    restored.load_state_dict(state)
    for one, other in zip(train(optimizer, given), train(restored, others), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_half_precision_and_gradients(kind: Any) -> None:
    given = parameters(torch.bfloat16)
    optimizer = kind(given, lr=0.01, set_grad_none=False)
    assert all(each.isfinite().all() for each in train(optimizer, given))
    optimizer.zero_grad()
    assert not given[0].grad.any()
    optimizer.zero_grad(set_to_none=True)
    assert given[0].grad is None


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"lr": -1.0}, "lr"),
        ({"eps": float("nan")}, "eps"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_arguments_out_of_range(kind: Any, wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__}.*{named}.*received"):
        kind(parameters(), **wrong)
    with pytest.raises(RuntimeError, match="amsgrad"):
        kind(parameters(), amsgrad=True)


def test_norm_type() -> None:
    with pytest.raises(ValueError, match="norm_type 2"):
        smp.optimizers.FusedNovoGrad(parameters(), norm_type=1)


def test_layer_norm() -> None:
    layer = smp.nn.FusedLayerNorm((3, 4), eps=1e-3)
    plain = nn.LayerNorm((3, 4), eps=1e-3)
    x = torch.randn(2, 3, 4)
    assert torch.equal(layer(x), plain(x))
    assert layer.state_dict().keys() == plain.state_dict().keys()
    assert not isinstance(plain, smp.nn.FusedLayerNorm)
    assert list(smp.nn.FusedLayerNorm(8, elementwise_affine=False).parameters()) == []
