"""Adam in one pass over memory does what clipping, torch's kernel and a cast do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.precision import one_pass_adam
from smdistributed.modelparallel.torch.precision.one_pass_adam import OnePassAdam

KINDS = (torch.optim.Adam, torch.optim.AdamW)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(40, 3), (5,), (16,), (), (2, 8), (17,)]


def made(kind: Any, options: dict[str, Any]) -> tuple[list[nn.Parameter], Any]:
    torch.manual_seed(3)
    parameters = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in SHAPES]
    return parameters, kind(parameters, fused=True, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05, device=DEVICE)])
def test_it_does_what_torch_does(
    kind: Any, decay: float, clips: bool, lr: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    work = one_pass_adam._adam
    monkeypatch.setattr(one_pass_adam, "_adam", lambda *a: (calls.append(a[0].numel()), work(*a)))
    options = {"lr": lr, "weight_decay": decay, "betas": (0.8, 0.95)}
    (own, optimizer), (plain, reference) = made(kind, options), made(kind, options)
    # One has a gradient later than the others, so that steps differ.
    for step in range(6):
        for one, other in zip(own, plain, strict=True):
            gradient = torch.randn(one.shape, device=DEVICE)
            if step or one.shape != (17,):
                one.grad, other.grad = gradient, gradient.clone()
        factor = torch.tensor(0.3, device=DEVICE) if clips else None
        if factor is not None:
            for each in plain:
                if each.grad is not None:
                    each.grad.mul_(factor)
        reference.step()
        copies = {id(each): each.detach().bfloat16() for each in own[:3]}
        versions = {id(each): each._version for each in own}
        with OnePassAdam(copies, factor, smallest=16) as one_pass:
            optimizer.step()
        for each in own:
            if each.numel() >= 16 and each.grad is not None:
                assert each._version > versions[id(each)]
        assert one_pass.copied == {id(own[0]), id(own[2])}
        for one, other in zip(own, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-7)
            if id(one) in one_pass.copied:
                assert torch.equal(copies[id(one)], one.bfloat16())
            state, want = optimizer.state[one], reference.state[other]
            for key in want:
                torch.testing.assert_close(state[key], want[key], rtol=2e-6, atol=2e-7)
    assert sorted(set(calls)) == [16, 17, 120]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_computed_in_single_precision(kind: Any, dtype: torch.dtype) -> None:
    options = {"lr": 0.05, "weight_decay": 0.2, "eps": 1e-4}
    (own, optimizer), (plain, reference) = made(kind, options), made(kind, options)
    for each in (*own, *plain):
        each.data = each.data.to(dtype)
    for _ in range(6):
        for one, other in zip(own, plain, strict=True):
            one.grad = torch.randn(one.shape, device=DEVICE).to(dtype)
            other.grad = one.grad.clone()
        reference.step()
        with OnePassAdam({}, None, smallest=16):
            optimizer.step()
        for one, other in zip(own, plain, strict=True):
            # Equal but for what lies between two numbers of the type, and goes to either.
            states = optimizer.state[one], reference.state[other]
            for got, want in ((one, other), *((each[key] for each in states) for key in states[1])):
                torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
                # One number of a small tensor is many of a hundred.
                assert (got != want).sum() <= max(2, got.numel() // 10)


def test_an_update_that_may_be_left_out_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass_adam, "_adam", None)  # not to be called
    parameters, optimizer = made(torch.optim.AdamW, {})
    before = parameters[0].detach().clone()
    parameters[0].grad = torch.ones(40, 3, device=DEVICE)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor([2.0, 1.0], device=DEVICE).unbind()
    with OnePassAdam({}, None, smallest=16):
        optimizer.step()
    assert torch.equal(parameters[0], before)


def test_copies_with_gaps_are_left() -> None:
    parameters, optimizer = made(torch.optim.AdamW, {})
    parameters[0].grad = torch.ones(40, 3, device=DEVICE)
    gaps = torch.zeros(40, 6, dtype=torch.bfloat16, device=DEVICE)[:, :3]
    with OnePassAdam({id(parameters[0]): gaps}, None, smallest=16) as one_pass:
        optimizer.step()
    assert not one_pass.copied
    assert not gaps.any()


def test_what_it_leaves_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.setattr(one_pass_adam, "has_kernel", lambda: True)
    for kind, given in itertools.product(KINDS, ({}, {"amsgrad": True}, {"maximize": True})):
        _, optimizer = made(kind, given)
        assert OnePassAdam.takes(optimizer, device) is (not given)
        assert not OnePassAdam.takes(optimizer, torch.device("cpu"))
        # What a script sees before a step is clipped already.
        optimizer.register_step_pre_hook(lambda *_: None)
        assert not OnePassAdam.takes(optimizer, device)
    parameters, _ = made(torch.optim.Adam, {})
    assert not OnePassAdam.takes(torch.optim.AdamW(parameters), device)
    assert not OnePassAdam.takes(torch.optim.SGD(parameters, fused=True), device)

    class Own(torch.optim.AdamW):
        pass

    assert not OnePassAdam.takes(Own(parameters, fused=True), device)

    _, optimizer = made(torch.optim.AdamW, {})
    assert OnePassAdam.takes(optimizer, device)
    monkeypatch.setattr(one_pass_adam, "has_kernel", lambda: False)
    assert not OnePassAdam.takes(optimizer, device)
