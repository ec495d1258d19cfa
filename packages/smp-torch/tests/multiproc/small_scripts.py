"""Small training scripts, run as plain PyTorch and with the library.

A script has a class ``Net`` and a function ``body(model, x, y)`` that returns the loss; ``NET`` is
its model. If it has ``kept()``, that returns what it has stored, on every rank. Losses, gradients,
buffers, parameters and what is stored must be the same, or the library must refuse it with an error
of its own.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from reference import GRADIENT_TOLERANCE, LOSS_TOLERANCE, MICROBATCHES, Plain
from torch import nn
from world import generator

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import CommError, SMPError

WIDTH = 4
STEPS = 3
#: Changes a script between two steps: its names, the user's model, the model that it calls, which.
Between = Callable[[dict[str, Any], nn.Module, Any, int], None]


def _seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def _names(script: str) -> dict[str, Any]:
    _seed()
    names: dict[str, Any] = {"__name__": "small_script"}
    exec(compile(script, "<script>", "exec"), names)
    return names


def _train(
    names: dict[str, Any], between: Between, step: Any, net: nn.Module, model: Any
) -> Iterator[Any]:
    """Yields what each step returns."""
    numbers = generator(2)
    names["NET"] = net
    _seed()
    for number in range(names.get("STEPS", STEPS)):
        if number:
            between(names, net, model, number)
        if not (number and names.get("REUSES_BATCH")):
            x, y = (torch.randn(MICROBATCHES * 2, WIDTH, generator=numbers) for _ in range(2))
        net.zero_grad()
        with names.get("around", contextlib.nullcontext)():
            found = step(x, y)
        yield found


def _plainly(names: dict[str, Any], between: Between, net: nn.Module) -> list[Any]:
    """Returns losses, gradients, buffers and parameters of each step."""
    model = Plain(net, 1 / MICROBATCHES)

    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
        return [names["body"](model, *part).detach() for part in parts]

    if "made" in names:
        names["made"](model, lambda optimizer: optimizer)
    found = []
    for losses in _train(names, between, step, net, model):
        gradients = {
            name: None if each.grad is None else each.grad.clone()
            for name, each in net.named_parameters()
        }
        buffers = {name: each.clone() for name, each in net.named_buffers()}
        weights = {name: each.detach().clone() for name, each in net.named_parameters()}
        found.append((losses, gradients, buffers, weights, _kept(names)))
    return found


def _kept(names: dict[str, Any]) -> list[Any]:
    """Returns what a script says that it has stored: numbers, tensors and texts."""
    found = names["kept"]() if "kept" in names else []
    return [each if isinstance(each, str) else np.array(each, float) for each in found]


def _is_close(one: Any, other: Any) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return bool(one == other)
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-5, atol=1e-6)


def _difference(expected: Any, found: Any, model: Any, kept: list[Any]) -> str:
    losses, gradients, buffers, weights, stored = expected
    # Ranks with slices add products up in another order.
    tolerance = GRADIENT_TOLERANCE * (10 if smp.tp_size() > 1 else 1)
    if len(stored) != len(kept) or not all(map(_is_close, stored, kept)):
        return f"wrong: stored {kept} instead of {stored}"
    for one, other in zip(losses, found.outputs, strict=True):
        if not (one - other).abs() <= LOSS_TOLERANCE * max(1.0, float(one.abs())):
            return f"wrong: loss {other.item()} instead of {one.item()}"
    for name, parameter in model.local_named_parameters():
        want, got = gradients[name], parameter.grad
        if want is None or got is None:
            if (want is None or not want.any()) and (got is None or not got.any()):
                continue
            return f"wrong: {name} has {'no' if got is None else 'a'} gradient"
        most = tolerance * max(1.0, float(want.abs().max()))
        if not (want - got).abs().max() <= most:
            return f"wrong: gradient of {name}"
    for name, parameter in model.local_named_parameters():
        if not torch.allclose(weights[name], parameter.detach(), rtol=1e-5, atol=1e-6):
            return f"wrong: parameter {name}"
    for name, buffer in model.local_named_buffers():
        if not torch.allclose(buffers[name], buffer, rtol=1e-5, atol=1e-6):
            return f"wrong: buffer {name}"
    return ""


def is_split(model: Any) -> bool:
    """Whether each rank of a pipeline has a part of a model."""
    parts = smp.allgather(any(True for _ in model.local_parameters()), smp.PP_GROUP)
    return all(parts)


def outcome_of(script: str, between: Between) -> str:
    """Runs a script in this job; returns what became of it.

    Returns:
        "exact", "whole" (exact, but one rank has the whole model), why it was refused, or what was
        wrong.
    """
    names = _names(script)
    plain = names["Net"]()
    start = copy.deepcopy(plain.state_dict())
    if "built" in names:
        names["built"](plain)
    try:
        expected = _plainly(names, between, plain)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        return f"no script: {error}"  # plain PyTorch refuses it
    finally:
        torch.set_default_dtype(torch.float32)
    names = _names(script)
    net = names["Net"]()
    net.load_state_dict(start)
    try:
        if "built" in names:
            names["built"](net)
        _seed()
        if smp.tp_size() > 1:
            smp.set_tensor_parallelism(net, auto=True)
        model = smp.DistributedModel(net)
        if "made" in names:
            names["made"](model, smp.DistributedOptimizer)
        step = smp.step(names["body"])
        runs = _train(names, between, lambda x, y: step(model, x, y), net, model)
        # To the end, whatever this rank finds: the others go on.
        differences = [
            _difference(*each, model, _kept(names)) for each in zip(expected, runs, strict=True)
        ]
        split = is_split(model)
        if any(differences):
            return next(filter(None, differences))
    except CommError as error:
        return f"wrong: {error}"
    except SMPError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    finally:
        torch.set_default_dtype(torch.float32)
    return "exact" if split else "whole"


def losses_of(script: str, between: Between) -> list[list[float]]:
    """Runs a script with the library; returns the losses of each step and microbatch."""
    names = _names(script)
    net = names["Net"]()
    model = smp.DistributedModel(net)
    step = smp.step(names["body"])
    runs = _train(names, between, lambda x, y: step(model, x, y), net, model)
    return [[round(loss.item(), 5) for loss in found.outputs] for found in runs]
