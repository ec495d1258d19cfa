"""Step scripts that shift, cut off, put before, or choose tokens of sequences in pieces.

Each is a spelling of which tokens meet which labels, a loss, and code between the blocks of a
model. Losses, gradients and the parameters after two updates are compared with one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import context_cases
import torch
from context_cases import VOCABULARY
from context_scripts import Between, Blocks, verdicts_of
from torch import nn
from torch.nn import functional

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError

Pair = tuple[torch.Tensor, torch.Tensor]
#: (logits, labels, shift) -> the logits and the labels that meet
Spelling = Callable[[torch.Tensor, torch.Tensor, int], Pair]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _without_last(labels: torch.Tensor, shift: int) -> torch.Tensor:
    return labels.new_full((labels.shape[0], shift), -100)


def _narrowed(logits: torch.Tensor, labels: torch.Tensor, shift: int) -> Pair:
    length = logits.size(1) - shift
    return logits.narrow(1, 0, length), labels.narrow(1, shift, length)


def _rolled(logits: torch.Tensor, labels: torch.Tensor, shift: int) -> Pair:
    labels = labels.roll(-shift, 1)
    labels[:, -shift:] = -100
    return logits, labels


def _later_logits(logits: torch.Tensor, labels: torch.Tensor, shift: int) -> Pair:
    first = logits.new_zeros(logits.shape[0], shift, logits.shape[2])
    return torch.cat([first, logits[:, :-shift]], 1), labels


def _earlier_logits(logits: torch.Tensor, labels: torch.Tensor, shift: int) -> Pair:
    ends = functional.pad(logits[:, shift:], (0, 0, 0, shift))
    return ends, labels


SPELLINGS: dict[str, Spelling] = {
    "sliced": lambda x, y, k: (x[:, :-k], y[:, k:]),
    "ellipsis": lambda x, y, k: (x[..., :-k, :].contiguous(), y[..., k:].contiguous()),
    "narrowed": _narrowed,
    "numbers": lambda x, y, k: (x[:, : x.shape[1] - k], y[:, k : y.shape[1]]),
    "rolled": _rolled,
    "padded": lambda x, y, k: (x, functional.pad(y[:, k:], (0, k), value=-100)),
    "joined": lambda x, y, k: (x, torch.cat([y[:, k:], _without_last(y, k)], 1)),
    "rolled_logits": lambda x, y, k: (x.roll(k, 1), y),
    "later_logits": _later_logits,
    "earlier_logits": _earlier_logits,
    "split": lambda x, y, k: (
        x.split([x.shape[1] - k, k], 1)[0],
        y.split([k, y.shape[1] - k], 1)[1],
    ),
    "middle": lambda x, y, k: (x[:, k:-k], y[:, k:-k]),
    "half": lambda x, y, k: (x[:, x.shape[1] // 2 :], y[:, y.shape[1] // 2 :]),
    "backwards": lambda x, y, k: (x.flip(1)[:, k:], y.flip(1)[:, :-k]),
}


def _viewed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = logits.reshape(-1, logits.size(-1))
    return functional.cross_entropy(logits, labels.reshape(-1))


def _sized(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    batch, length, width = logits.shape
    logits = logits.reshape(batch * length, width)
    return functional.cross_entropy(logits, labels.reshape(batch * length))


def _summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    total = functional.cross_entropy(logits.mT, labels, reduction="sum")
    return total / (labels != -100).sum()


def _masked(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mask = (labels != -100).to(logits.dtype)
    losses = functional.cross_entropy(logits.mT, labels.clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum().clamp(min=1)


def _of_examples(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = functional.cross_entropy(logits.mT, labels.clamp(min=0), reduction="none")
    return losses.mean(1).square().mean()


def _chosen(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As of a policy, or of preferences."""
    log_probs = logits.log_softmax(-1)
    chosen = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    mask = labels != -100
    ratios = (chosen - chosen.detach()).exp()
    return -(ratios * mask).sum(-1).mean() - functional.logsigmoid((chosen * mask).sum(-1)).mean()


def _smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=-100)
    return loss(logits.flatten(0, 1), labels.flatten())


def _weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weight = torch.arange(1.0, VOCABULARY + 1, dtype=logits.dtype)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weight)


def _neighbours(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Distils each token of the one after it."""
    target = logits.detach()[:, 1:].softmax(-1)
    loss = functional.kl_div(logits[:, :-1].log_softmax(-1), target, reduction="batchmean")
    return loss + _viewed(logits, labels)


def _chunked(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    total = logits.new_zeros(())
    for each, target in zip(logits.chunk(3, 1), labels.chunk(3, 1), strict=True):
        total = total + functional.cross_entropy(
            each.flatten(0, 1), target.flatten(), reduction="sum"
        )
    return total / (labels != -100).sum()


def _averaged(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return _viewed(logits, labels) + (logits[:, 1:] - logits[:, :-1]).square().mean()


LOSSES: dict[str, Loss] = {
    "viewed": _viewed,
    "sized": _sized,
    "summed": _summed,
    "masked": _masked,
    "of_examples": _of_examples,
    "chosen": _chosen,
    "smoothed": _smoothed,
    "weighted": _weighted,
    "neighbours": _neighbours,
    "chunked": _chunked,
    "averaged": _averaged,
}


def _with_first(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    first = net.scale.expand(len(x), 1, -1)
    x = net.blocks[0](torch.cat([first, x], 1))
    return x[:, 1:] + x[:, :1]


def _with_prompt(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    prompt = net.places.weight[:3].unsqueeze(0).expand(x.shape[0], -1, -1)
    x = torch.cat([prompt, x], 1)
    for block in (net.blocks[0], net.blocks[1]):
        x = block(x)
    return x[:, 3:]


def _with_last(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    x = net.blocks[1](torch.cat([x, net.scale.expand(len(x), 1, -1)], 1))
    return x[:, :-1] * x[:, -1:].sigmoid()


def _shifted(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    before = functional.pad(x, (0, 0, 1, -1))
    return x * net.scale.sigmoid() + before * (1 - net.scale.sigmoid())


def _differences(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    steps = x[:, 1:] - x[:, :-1]
    return x + functional.pad(steps, (0, 0, 1, 0)).tanh()


def _both_ways(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return net.blocks[1](x) + net.blocks[1](x.flip(1)).flip(1)


def _convolved(net: Any, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A causal convolution of each channel by hand."""
    early = functional.pad(x, (0, 0, 3, 0))
    taps = [early[:, at : at + x.shape[1]] * net.scale * (at + 1) for at in range(4)]
    return x + sum(taps).tanh()


BETWEEN: dict[str, Between] = {
    "plain": lambda net, x, tokens: x,
    "first": _with_first,
    "prompt": _with_prompt,
    "last": _with_last,
    "shifted": _shifted,
    "differences": _differences,
    "both_ways": _both_ways,
    "convolved": _convolved,
}


def _several(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Losses of several tokens ahead."""
    logits = model(tokens)
    losses = [_viewed(logits[:, :-ahead], labels[:, ahead:]) / ahead for ahead in (1, 2, 3)]
    return sum(losses)  # type: ignore[return-value]


def _of_cut_tokens(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    return _viewed(model(inputs), targets)


def _with_a_token_first(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    first = tokens.new_ones(len(tokens), 1)
    return _viewed(model(torch.cat([first, tokens], 1))[:, 1:], labels)


def _answers(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    starts, ends = model(tokens)[..., :2].split(1, dim=-1)
    starts, ends = starts.squeeze(-1).contiguous(), ends.squeeze(-1).contiguous()
    ignored = starts.size(1)
    places = (tokens[:, 0] % 8).clamp(0, ignored), (tokens[:, 1] % 8).clamp(0, ignored)
    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    return (loss(starts, places[0]) + loss(ends, places[1])) / 2


def _critic(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Errors of one step, as of values."""
    logits = model(tokens)
    values, policy = logits[..., 0], logits[:, :-1].log_softmax(-1)
    rewards = (tokens[:, 1:] % 3).to(values.dtype)
    steps = rewards + 0.9 * values[:, 1:].detach() - values[:, :-1]
    taken = policy.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    entropy = -(policy.exp() * policy).sum(-1).mean()
    return steps.square().mean() - (taken * steps.detach()).mean() - 0.01 * entropy


def _prefix_and_rest(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return _viewed(logits[:, :4], labels[:, :4]) + 2 * _viewed(logits[:, 4:], labels[:, 4:])


def _active(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits, labels = model(tokens)[:, :-1], labels[:, 1:]
    active = labels != -100
    return functional.cross_entropy(logits[active], labels[active])


def _categorical(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    policy = torch.distributions.Categorical(logits=model(tokens))
    return -policy.log_prob(tokens).mean() - 0.01 * policy.entropy().mean()


def _chosen_losses(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits, labels = model(tokens)[:, :-1], labels[:, 1:]
    losses = functional.cross_entropy(logits.mT, labels.clamp(min=0), reduction="none")
    worst = losses.flatten().topk(3).values.mean()
    return losses[labels != -100].mean() + 0.1 * worst


def _policy(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A policy that was sampled from, and advantages of rewards to come."""
    logits = model(tokens)
    policy = torch.distributions.Categorical(logits=logits[:, :-1])
    values, rewards = logits[:, :-1, 0], (tokens[:, 1:] % 3).to(logits.dtype)
    returns = rewards.flip(1).cumsum(1).flip(1)
    advantages = returns - values
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-5)
    chosen = policy.log_prob(tokens[:, 1:])
    smooth = values.cumsum(1) / torch.arange(1, values.shape[1] + 1)
    ratios = (chosen - chosen.detach()).exp()
    clipped = torch.min(ratios * advantages.detach(), ratios.clamp(0.8, 1.2) * advantages.detach())
    return -clipped.mean() + advantages.square().mean() + smooth.square().mean()


def _attended(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Pools tokens by scores of their own."""
    logits = model(tokens)
    weights = logits[..., :1].masked_fill((tokens == 3).unsqueeze(-1), -1e9).softmax(1)
    return functional.cross_entropy((weights * logits).sum(1), tokens[:, 0])


def _chunks_of_hidden(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits, targets = model(tokens)[:, :-1], labels[:, 1:]
    total, size = logits.new_zeros(()), 4
    for at in range(0, targets.shape[1], size):
        chunk = logits[:, at : at + size].reshape(-1, VOCABULARY)
        wanted = targets[:, at : at + size].reshape(-1)
        total = total + functional.cross_entropy(chunk, wanted, reduction="sum")
    return total / (targets != -100).sum()


Body = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]

BODIES: dict[str, Body] = {
    "several": _several,
    "of_cut_tokens": _of_cut_tokens,
    "with_a_token_first": _with_a_token_first,
    "answers": _answers,
    "critic": _critic,
    "prefix_and_rest": _prefix_and_rest,
    "active": _active,
    "categorical": _categorical,
    "chosen_losses": _chosen_losses,
    "policy": _policy,
    "attended": _attended,
    "chunks_of_hidden": _chunks_of_hidden,
}


def _body(spelling: Spelling, loss: Loss, shift: int) -> Body:
    return lambda model, tokens, labels: loss(*spelling(model(tokens), labels, shift))


#: A script: code between blocks, a step, and the lengths of its batches.
Script = tuple[Between, Body, tuple[int, int]]


def scripts() -> dict[str, Script]:
    """Returns the population."""
    lengths = itertools.cycle([(16, 12), (13, 16), (16, 15)])
    shifts = itertools.cycle([1, 2, 1, 3])
    betweens = itertools.cycle(BETWEEN)
    found: dict[str, Script] = {}
    for (spelling, pair), (name, loss) in itertools.product(SPELLINGS.items(), LOSSES.items()):
        between, shift, sizes = next(betweens), next(shifts), next(lengths)
        key = f"{spelling}-{name}-{shift}-{between}-{sizes[0]}"
        found[key] = BETWEEN[between], _body(pair, loss, shift), sizes
    for (name, body), between in itertools.product(BODIES.items(), BETWEEN):
        sizes = next(lengths)
        found[f"{name}-{between}-{sizes[0]}"] = BETWEEN[between], body, sizes
    return found


def verdicts(chosen: list[str], microbatches: int = 2) -> dict[str, str]:
    """Returns for each script whether it was exact, wrong, or refused by name."""
    every = scripts()

    def difference(name: str) -> float:
        return max(_differences_of(every[name], microbatches))

    return verdicts_of(chosen, difference, SMPError, ("set ", "Use ", "put ", "pad "))


def _differences_of(script: Script, microbatches: int) -> Iterator[float]:
    """Yields by how much losses, gradients and parameters differ in steps of a script."""
    between, body, lengths = script
    torch.manual_seed(3)
    plain = Blocks(between)
    torch.manual_seed(3)
    model = smp.DistributedModel(Blocks(between))
    optimizers = (
        torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5),
        smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)),
    )

    @smp.step(sequence_dims={"tokens": 1, "labels": 1})
    def train(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = body(model, tokens, labels)
        model.backward(loss)
        return loss

    tokens, labels = context_cases.tokens_of()
    for length in (*lengths, lengths[0]):
        for each in optimizers:
            each.zero_grad()
        batch = tokens[:, :length], labels[:, :length]
        parts = zip(*(each.chunk(microbatches) for each in batch), strict=True)
        losses = [body(plain, *each) for each in parts]
        (sum(losses) / microbatches).backward()
        got = train(model, *batch)
        for one, other in zip(losses, got.outputs, strict=True):
            yield float((one - other).detach().abs())
        yield context_cases.of_gradients(plain, model)
        for each in optimizers:
            each.step()
    expected = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        yield float((expected[name] - parameter).detach().abs().max())
