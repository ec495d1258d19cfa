"""Cases for GPUs: the numbers of one process over NCCL."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from torch import nn
from world import Case

import smdistributed.modelparallel.torch as smp

MICROBATCHES = 4
STEPS = 3


def _gpt2(dropout: float = 0.0) -> nn.Module:
    hf: Any = importlib.import_module("transformers")
    config = hf.GPT2Config(
        vocab_size=128,
        n_embd=64,
        n_layer=6,
        n_head=4,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    model: nn.Module = hf.GPT2LMHeadModel(config)
    return model


def _body(autocast: bool) -> Any:
    def body(model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            loss = model(tokens, attention_mask=mask, labels=tokens).loss
        model.backward(loss)
        return loss

    return body


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for index in range(STEPS):
        tokens = torch.randint(128, (2 * MICROBATCHES, 32))
        mask = torch.ones_like(tokens)
        # Padding in some microbatches only, another one in each step.
        mask[2 * (index % MICROBATCHES), 20:] = 0
        found.append((tokens.cuda(), mask.cuda()))
    return found


class _Plain:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss / MICROBATCHES)


def _on_host(index: int, tensor: torch.Tensor) -> torch.Tensor:
    """Returns what a data loader gives: pageable and pinned memory in turn."""
    host = tensor.cpu()
    return host.pin_memory() if index % 2 else host


def _compare(
    autocast: bool, loss_tolerance: float, gradient_tolerance: float, on_host: bool = False
) -> dict[str, float]:
    """Returns the largest differences, of losses and of gradients by their tensor's largest."""
    torch.backends.cuda.matmul.allow_tf32 = False
    module = _gpt2()
    reference = copy.deepcopy(module).cuda()
    model = smp.DistributedModel(module)
    body = _body(autocast)
    step = smp.step(body)
    differences = {"loss": 0.0, "gradient": 0.0}
    for index, (tokens, mask) in enumerate(_batches()):
        model.zero_grad()
        reference.zero_grad()
        wanted = [
            body(_Plain(reference), *part)
            for part in zip(tokens.chunk(MICROBATCHES), mask.chunk(MICROBATCHES), strict=True)
        ]
        given = (tokens, mask)
        if smp.pp_rank() > 0:
            given = tuple(torch.empty(len(each), 0, device=each.device) for each in given)
        if on_host:
            given = tuple(_on_host(index, each) for each in given)
        got = step(model, *given)
        for each in given if on_host else ():
            each.zero_()  # a loader may use its memory again once the call has returned
        for one, other in zip(got.outputs, wanted, strict=True):
            differences["loss"] = max(differences["loss"], (one - other).abs().item())
        gradients = {name: each.grad for name, each in reference.named_parameters()}
        for name, parameter in model.local_named_parameters():
            other = gradients[name]
            assert parameter.grad is not None, name
            assert other is not None, name
            difference = (parameter.grad - other).abs().max() / other.abs().max()
            differences["gradient"] = max(differences["gradient"], difference.item())
    everyone = smp.allgather(differences, smp.WORLD)
    worst = {key: max(each[key] for each in everyone) for key in differences}
    assert worst["loss"] <= loss_tolerance, worst
    assert worst["gradient"] <= gradient_tolerance, worst
    return worst


def case_fp32() -> dict[str, float]:
    return _compare(False, 1e-6, 1e-5)


def case_host_inputs() -> dict[str, float]:
    return _compare(False, 1e-6, 1e-5, on_host=True)


def case_host_inputs_that_are_written() -> None:
    torch.manual_seed(3)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))

    @smp.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        x.mul_(2)
        return loss

    x = torch.arange(32.0).view(8, 4).cpu()
    before = x.clone()
    assert step(model, x).reduce_mean().device.type == "cuda"
    assert torch.equal(x, 2 * before)


def case_bf16_autocast() -> dict[str, float]:
    # The same operations in the same precision; only sums of gradients have another order.
    return _compare(True, 1e-6, 2e-2)


def case_dropout() -> list[list[float]]:
    """Returns the losses; they must not depend on the number of partitions."""
    torch.manual_seed(3)
    model = smp.DistributedModel(_gpt2(dropout=0.1))
    step = smp.step(_body(False))
    return [step(model, *batch).stack().tolist() for batch in _batches()]


def cases() -> dict[str, Case]:
    """Every case of this module by name."""
    prefix = "case_"
    return {
        name.removeprefix(prefix): function
        for name, function in globals().items()
        if name.startswith(prefix)
    }
