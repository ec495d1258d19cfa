"""PyTorch: a script that does much of what scripts do, beside the same one without the library."""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np

from conformance.adapters.base import WIDTH
from conformance.cases.torch.model import SPLIT
from conformance.registry import torch_case

MICROBATCHES = 4
_WORDS = 11
_LENGTH = 5
#: What a block of the model reads from the environment.
_GAIN = "CONFORMANCE_GAIN"


def busy_net() -> Any:
    """Returns a model with Python state, tied weights, containers, skips, hooks and branches."""
    import torch
    from torch import nn

    torch.manual_seed(3)

    class Block(nn.Module):
        """Counts its calls, keeps a mean, reads the environment, changes its input in place."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 2 * WIDTH)
            self.outer = nn.Linear(2 * WIDTH, WIDTH)
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.calls = 0

        def forward(self, x: Any, mask: Any, *, options: dict[str, Any]) -> tuple[Any, Any]:
            self.calls += 1
            gate, value = self.inner(x).chunk(2, dim=-1)
            wide = torch.cat([torch.sigmoid(gate), value], -1)
            wide[..., 0] += 0.1 * self.calls
            result = self.outer(wide) * float(os.environ.get(_GAIN, "1"))
            if mask is not None:
                result = result.masked_fill(~mask[..., None], 0.0)
            with torch.no_grad():
                self.mean.mul_(0.9).add_(result.mean((0, 1)), alpha=0.1)
            return x + result / (1 + options["depth"]), result - self.mean

    class Busy(nn.Module):
        """Everything between the blocks is code that is not theirs."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(_WORDS, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, _WORDS, bias=False)
            self.head.weight = self.words.weight
            self.register_buffer("places", torch.arange(_LENGTH))
            self.passes = 0
            self.slow = True

        def forward(self, ids: Any, mask: Any = None, *, scale: float = 1.0) -> dict[str, Any]:
            self.passes += 1
            x = self.words(ids) * scale + self.places[None, :, None] / 10
            kept = []
            for depth, block in enumerate(self.blocks):
                if self.slow or depth != 1:
                    x, extra = block(x, mask, options={"depth": depth, "kept": len(kept)})
                    kept.append(extra)
            x = x + torch.stack(kept).mean(0) + 0.01 * self.passes
            x[:, 0] *= 2
            with torch.no_grad():
                level = x.abs().amax()
            logits = self.head(self.norm(x))
            return {"logits": logits, "level": level, "last": (x[:, -1], None), "n": self.passes}

    net = Busy()
    net.blocks[2].register_forward_hook(lambda module, args, out: (out[0] * 1.5, out[1]))
    net.norm.register_forward_pre_hook(lambda module, args: (args[0] + 0.25,))
    return net


def body(model: Any, ids: Any, mask: Any, scale: float, backward: Any) -> tuple[Any, ...]:
    """Returns what a microbatch comes to."""
    from torch.nn import functional

    found = model(ids, mask if bool(mask.any()) else None, scale=scale)
    targets = ids.roll(-1, dims=1)
    loss = functional.cross_entropy(found["logits"].flatten(0, 1), targets.flatten())
    loss = loss + 0.1 * found["last"][0].square().mean()
    backward(loss)
    return loss, found["level"], found["logits"].argmax(-1)


def batches(adapter: Any) -> list[tuple[Any, Any, float]]:
    """Returns the batches of the steps: one without a mask, one of another size."""
    import torch

    numbers = np.random.default_rng(1)
    found = []
    kinds = ((8, True, 1.0), (8, False, 1.0), (12, True, 0.5), (8, True, 2.0))
    for size, is_masked, scale in kinds:
        ids = torch.from_numpy(numbers.integers(0, _WORDS, (size, _LENGTH))).to(adapter.device)
        mask = torch.from_numpy(numbers.random((size, _LENGTH)) < 0.8).to(adapter.device)
        found.append((ids, mask & is_masked, scale))
    return found


def change(net: Any, number: int) -> None:
    """Changes, before a step, what the model reads."""
    os.environ[_GAIN] = str(1 + number / 4)
    net.slow = number != 2
    net.norm.eps = 1e-5 * (1 + 100 * number)


def without_the_library(adapter: Any, net: Any) -> tuple[list[list[Any]], Any]:
    """Returns the results of each microbatch of each step, and the trained model."""
    import torch

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    results = []
    for number, (ids, mask, scale) in enumerate(batches(adapter)):
        change(net, number)
        optimizer.zero_grad()
        parts = zip(ids.chunk(MICROBATCHES), mask.chunk(MICROBATCHES), strict=True)
        found = [
            body(net, each, part, scale, lambda loss: (loss / MICROBATCHES).backward())
            for each, part in parts
        ]
        results.append([[each.detach() for each in one] for one in zip(*found, strict=True)])
        optimizer.step()
    return results, net


@torch_case("torch.script_rules", "torch.gradients", worlds=("alone", *SPLIT))
def a_busy_script_trains_as_without_the_library(adapter: Any) -> None:
    import torch

    smp = adapter.smp
    net = busy_net().to(adapter.device)
    try:
        wanted, plain = without_the_library(adapter, copy.deepcopy(net))
        model = smp.DistributedModel(net)
        optimizer = smp.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        )

        @smp.step
        def train(model: Any, ids: Any, mask: Any, scale: float) -> Any:
            return body(model, ids, mask, scale, model.backward)

        for number, (ids, mask, scale) in enumerate(batches(adapter)):
            change(net, number)
            optimizer.zero_grad()
            outputs = train(model, ids, mask, scale)
            for got, want in zip(outputs, wanted[number], strict=True):
                for one, other in zip(got.outputs, want, strict=True):
                    torch.testing.assert_close(one, other)
            optimizer.step()
    finally:
        os.environ.pop(_GAIN, None)
    trained = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter, trained[name])
    assert net.passes == plain.passes
