"""Training beside one process, with optimizers whose state or parameters are shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference import own_share, run_plain
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp

TOLERANCE = 1e-6

Make = Callable[[Any], torch.optim.Optimizer]
Between = Callable[[nn.Module, smp.DistributedModel, int], None]


def body(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(inputs), targets)
    model.backward(loss)
    return loss


def trained_beside(
    build: Callable[[], nn.Module],
    make: Make,
    data: list[Any],
    *,
    body: Callable[..., Any] = body,
    max_norm: float | None = None,
    between: Between = lambda module, model, step: None,
) -> tuple[nn.Module, smp.DistributedModel]:
    """Losses, norms and parameters of one process, clipped as the configuration says.

    Returns:
        the model of one process, and the distributed one; they have equal parameters.
    """
    reference, model = build(), smp.DistributedModel(build())
    plain = make(reference.parameters())
    optimizer = smp.DistributedOptimizer(make(model.parameters()))
    step = smp.step(body)
    bound = float("inf")
    if smp.state.cfg.sharded_data_parallel_degree > 1:
        bound = smp.state.cfg.sdp_gradient_clipping
    for number, each in enumerate(data):
        between(reference, model, number)
        plain.zero_grad()
        optimizer.zero_grad()
        want = run_plain(reference, body, each)
        got = step(model, *own_share(each, [0, 0]))
        for one, other in zip(got.outputs, want, strict=True):
            assert one.item() == pytest.approx(other.item(), rel=TOLERANCE)
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            expected = nn.utils.clip_grad_norm_(list(reference.parameters()), max_norm)
            assert norm.item() == pytest.approx(expected.item(), rel=TOLERANCE)
        if bound < float("inf"):
            nn.utils.clip_grad_norm_(list(reference.parameters()), bound)
        plain.step()
        optimizer.step()
    state = model.state_dict()
    for name, value in reference.state_dict().items():
        assert torch.allclose(state[name].cpu(), value.cpu(), rtol=1e-5, atol=1e-6), name
    return reference, model
