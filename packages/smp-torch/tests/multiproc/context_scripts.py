"""Step scripts over sequences in pieces: what code between modules does is exact, or refused.

Each script is a model, of which parts are code between its blocks, and a step function. Its losses,
results and gradients are compared with those of one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import context_cases
import torch
from context_cases import MIXES, VOCABULARY, WIDTH, Layer, attended, loss_of, of_gradients
from torch import nn
from torch.nn import functional

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError

#: (model, tokens, labels, mask) -> what the step returns, with its loss
Body = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], dict[str, Any]]
#: (the model, hidden states between its blocks, tokens) -> hidden states
Between = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


class Blocks(nn.Module):
    """Blocks of a language model, with code between them."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(
            Layer(functools.partial(attended, is_causal=bool(number % 2))) for number in range(4)
        )
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("table", torch.arange(64))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.between = between

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                x = self.between(self, x, tokens)
        return self.head(self.norm(x))


def _mixed(mix: Callable[[torch.Tensor], torch.Tensor]) -> Between:
    return lambda net, x, tokens: x + 0.1 * mix(x)


def _masked(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return x * (tokens != 3).unsqueeze(-1)


def _mean_of_masked(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    mask = (tokens != 3).unsqueeze(-1).to(x.dtype)
    return x + (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)


def _positions(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return x + net.places(net.table[: tokens.shape[1]])


def _padded_positions(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return x + net.places((tokens != 3).cumsum(1))


def _looked_at(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.square().sum() > 0 else x


def _asked_of_tokens(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return x * 2 if bool((tokens >= 0).all()) else x


def _attention_between(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    mask = (tokens != 3)[:, None, None, :]
    return x + attended(x, attn_mask=mask | torch.eye(tokens.shape[1], dtype=torch.bool))


def _first_token(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return x + x[:, :1]


def _last_of_each(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    last = (tokens != 3).sum(1) - 1
    return x + x[torch.arange(len(x)), last].unsqueeze(1)


def _flattened(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    batch, length, width = x.shape
    return functional.gelu(x.reshape(batch * length, width)).view(batch, length, width) * net.scale


def _heads(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    batch, length, width = x.shape
    heads = x.view(batch, length, 3, width // 3).transpose(1, 2).flatten(0, 1)
    return x + heads.sigmoid().view(batch, 3, length, width // 3).transpose(1, 2).flatten(2)


def _hooked(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    x = x * 1
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 2)
    return x


def _checkpointed(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda x: net.blocks[0](x) * net.scale, x, use_reentrant=False)


def _looped(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return net.blocks[0](x) + net.blocks[3](x)


def _without_gradients(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        weights = x.softmax(-1)
    return x + weights


BETWEEN: dict[str, Between] = {
    **{f"mix_{name}": _mixed(mix) for name, (mix, _) in MIXES.items()},
    "masked": _masked,
    "mean_of_masked": _mean_of_masked,
    "positions": _positions,
    "padded_positions": _padded_positions,
    "looked_at": _looked_at,
    "asked_of_tokens": _asked_of_tokens,
    "attention_between": _attention_between,
    "first_token": _first_token,
    "last_of_each": _last_of_each,
    "flattened": _flattened,
    "heads": _heads,
    "hooked": _hooked,
    "checkpointed": _checkpointed,
    "looped": _looped,
    "without_gradients": _without_gradients,
}


def _usual(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    return {"loss": loss_of(model(tokens), labels)}


def _logits(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    logits = model(tokens)
    found = {"loss": loss_of(logits, labels), "logits": logits, "probabilities": logits.softmax(-1)}
    return {**found, "tokens": logits.argmax(-1), "mask": mask}


def _accuracy(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    logits = model(tokens)
    right = (logits.argmax(-1) == labels) & (labels != -100)
    counted = (labels != -100).sum()
    found = {"loss": loss_of(logits, labels), "right": right.sum() / counted}
    return {**found, "mean": right.float().mean()}


def _masked_mean(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    labels = labels.clamp(min=0)
    losses = functional.cross_entropy(model(tokens).mT, labels, reduction="none")
    return {"loss": (losses * mask).sum() / mask.sum()}


def _z_loss(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    logits = model(tokens)
    return {"loss": loss_of(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()}


def _smoothed(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    logits = model(tokens).flatten(0, 1)
    return {"loss": functional.cross_entropy(logits, labels.flatten(), label_smoothing=0.1)}


def _by_hand(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    chosen = model(tokens).log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1))
    return {"loss": -(chosen.squeeze(-1) * (labels != -100)).sum() / (labels != -100).sum()}


def _of_examples(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    losses = functional.cross_entropy(model(tokens).mT, labels.clamp(min=0), reduction="none")
    each = losses.mean(1)
    return {"loss": each.mean(), "each": each, "worst": each.max()}


def _pooled(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    pooled = model(tokens).mean(1)
    return {"loss": functional.cross_entropy(pooled, tokens[:, 0]), "pooled": pooled}


def _last_token(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    return {"loss": functional.cross_entropy(model(tokens)[:, -1], tokens[:, 0])}


def _shifted_logits(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    return {"loss": loss_of(model(tokens)[:, :-1], labels[:, 1:])}


def _shifted_labels(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    shifted = functional.pad(labels[:, 1:], (0, 1), value=-100)
    return {"loss": loss_of(model(tokens), shifted)}


def _number(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    loss = loss_of(model(tokens), labels)
    return {"loss": loss, "number": loss.item()}


def _finite(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    loss = loss_of(model(tokens), labels)
    assert torch.isfinite(loss)
    return {"loss": loss}


def _sum(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    logits = model(tokens).flatten(0, 1)
    return {"loss": functional.cross_entropy(logits, labels.flatten(), reduction="sum") / 64}


def _weighted(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    weight = torch.arange(1.0, VOCABULARY + 1, dtype=torch.float64)
    logits = model(tokens).flatten(0, 1)
    return {"loss": functional.cross_entropy(logits, labels.flatten(), weight=weight)}


def _distilled(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    logits = model(tokens)
    with torch.no_grad():
        target = (logits * 2).softmax(-1)
    loss = functional.kl_div(logits.log_softmax(-1), target, reduction="batchmean")
    return {"loss": loss}


def _twice(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    one = loss_of(model(tokens), labels)
    other = loss_of(model(tokens.flip(1)), labels.flip(1))
    return {"loss": one + other, "one": one}


def _squared(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    logits = model(tokens)
    return {"loss": functional.mse_loss(logits, logits.detach() * 0.5)}


def _contrasted(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    pooled = functional.normalize((model(tokens) * mask.unsqueeze(-1)).sum(1), dim=-1)
    return {"loss": (pooled @ pooled.mT).logsumexp(-1).mean()}


def _entropy_summed_up(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    losses = functional.cross_entropy(model(tokens).mT, labels.clamp(min=0), reduction="none")
    return {"loss": losses.cumsum(1).mean()}


def _halved(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    half = tokens.shape[1] // 2
    return {"loss": loss_of(model(tokens)[:, half:], labels[:, half:])}


def _kept_tokens(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    keep = labels != -100
    return {"loss": functional.cross_entropy(model(tokens)[keep], labels[keep])}


def _largest(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    logits = model(tokens)
    return {"loss": loss_of(logits, labels), "largest": logits.detach().amax()}


def _norm(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
    logits = model(tokens)
    return {"loss": loss_of(logits, labels), "norm": logits.detach().square().sum().sqrt()}


BODIES: dict[str, Body] = {
    "logits": _logits,
    "accuracy": _accuracy,
    "masked_mean": _masked_mean,
    "z_loss": _z_loss,
    "smoothed": _smoothed,
    "by_hand": _by_hand,
    "of_examples": _of_examples,
    "pooled": _pooled,
    "last_token": _last_token,
    "shifted_logits": _shifted_logits,
    "shifted_labels": _shifted_labels,
    "number": _number,
    "finite": _finite,
    "sum": _sum,
    "weighted": _weighted,
    "distilled": _distilled,
    "twice": _twice,
    "squared": _squared,
    "contrasted": _contrasted,
    "entropy_summed_up": _entropy_summed_up,
    "halved": _halved,
    "kept_tokens": _kept_tokens,
    "largest": _largest,
    "norm": _norm,
}


def names() -> list[str]:
    """Returns the names of all scripts."""
    return [*BETWEEN, *BODIES]


def verdicts_of(
    chosen: Sequence[str],
    difference: Callable[[str], float],
    refusal: type[SMPError],
    remedies: Sequence[str],
) -> dict[str, str]:
    """Returns for each script whether it was exact, wrong, or refused by name.

    Args:
        chosen: the names of scripts.
        difference: runs one, and returns by how much it differs from one process.
        refusal: the error of what is refused.
        remedies: words of which such an error has one.
    """
    torch.set_default_dtype(torch.float64)
    found = {}
    try:
        for name in chosen:
            try:
                worst = difference(name)
            except refusal as error:
                is_clear = any(word in str(error) for word in remedies)
                found[name] = "refused" if is_clear else f"unclear: {error}"
            except Exception as error:
                found[name] = f"unclear: {type(error).__name__}: {error}"
            else:
                found[name] = "exact" if worst < 1e-12 else f"wrong by {worst}"
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def verdicts(chosen: list[str], microbatches: int = 2) -> dict[str, str]:
    """Returns for each script whether it was exact, wrong, or refused by name."""
    remedies = ("set ", "Use ", "put ", "Put ", "Do it", "return")
    difference = functools.partial(_difference, microbatches=microbatches)
    return verdicts_of(chosen, difference, UnsupportedError, remedies)


def _difference(name: str, microbatches: int) -> float:
    """Returns by how much losses, results and gradients of three steps differ.

    The second one has shorter sequences, the third one no gradients.
    """
    between = BETWEEN.get(name, lambda net, x, tokens: x)
    body = BODIES.get(name, _usual)
    torch.manual_seed(3)
    plain = Blocks(between)
    torch.manual_seed(3)
    model = smp.DistributedModel(Blocks(between))

    @smp.step(sequence_dims={"tokens": 1, "labels": 1, "mask": 1})
    def train(model: Any, tokens: Any, labels: Any, mask: Any) -> dict[str, Any]:
        found = body(model, tokens, labels, mask)
        if torch.is_grad_enabled():
            model.backward(found["loss"])
        return found

    tokens, labels = context_cases.tokens_of()
    mask = (tokens % 3 > 0).double()
    worst = 0.0
    for step, length in enumerate((16, 8, 16)):
        batch = [each[:, :length] for each in (tokens, labels, mask)]
        plain.zero_grad()
        model.zero_grad()
        with torch.set_grad_enabled(step < 2):
            parts = zip(*(each.chunk(microbatches) for each in batch), strict=True)
            wanted = [body(plain, *each) for each in parts]
            if step < 2:
                (sum(each["loss"] for each in wanted) / microbatches).backward()
            got = train(model, *batch)
        for key, value in got.items():
            for one, each in zip(_outputs(value), wanted, strict=True):
                want, has = torch.as_tensor(each[key]), torch.as_tensor(one)
                worst = max(worst, float((has.double() - want.double()).abs().max()))
        if step < 2:
            worst = max(worst, of_gradients(plain, model))
    return worst


def _outputs(value: Any) -> list[Any]:
    return list(value.outputs) if hasattr(value, "outputs") else list(value)
