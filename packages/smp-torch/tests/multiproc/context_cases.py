"""Modules that are trained with sequences in pieces: exact, or refused by name."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import UnsupportedError

WIDTH, HEADS, VOCABULARY, LENGTH, EXAMPLES = 12, 3, 19, 16, 4

Function = Callable[[torch.Tensor], torch.Tensor]


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)


def merged(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def attended(x: torch.Tensor, **options: Any) -> torch.Tensor:
    h = heads(x)
    return merged(functional.scaled_dot_product_attention(h, h.flip(-1), h * 0.5, **options))


def by_hand(x: torch.Tensor) -> torch.Tensor:
    h = heads(x)
    return merged((h @ h.transpose(-2, -1)).softmax(-1) @ h)


def tril(x: torch.Tensor) -> torch.Tensor:
    length = x.shape[1]
    return torch.tril(torch.ones(length, length, dtype=torch.bool))


def banded(x: torch.Tensor) -> torch.Tensor:
    place = torch.arange(x.shape[1])
    near = (place[:, None] - place[None]).abs() < 3
    return attended(x, attn_mask=near)


def biased(x: torch.Tensor) -> torch.Tensor:
    place = torch.arange(x.shape[1], dtype=x.dtype)
    return attended(x, attn_mask=-(place[:, None] - place[None]).abs()[None, None] * 0.1)


def latents(x: torch.Tensor) -> torch.Tensor:
    """A few queries that are no tokens read all of them."""
    query = torch.linspace(-1, 1, 5 * WIDTH, dtype=x.dtype).view(1, 5, WIDTH)
    h = heads(x)
    query = heads(query.expand(x.shape[0], -1, -1))
    return x + merged(functional.scaled_dot_product_attention(query, h, h)).mean(1, keepdim=True)


def linear_attention(x: torch.Tensor) -> torch.Tensor:
    h = heads(x)
    return merged(h @ (h.transpose(-2, -1) @ h) / 16)


def written(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[:, :, ::2] = x[:, :, ::2]
    return out


def shifted_in_place(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out[:, 1:] += x[:, :-1]
    return out


def at_positions(x: torch.Tensor) -> torch.Tensor:
    place = torch.arange(x.shape[1], dtype=x.dtype)
    angle = place[:, None] * torch.tensor([0.1, 0.2, 0.3])
    return x + torch.cat([angle.sin(), angle.cos()], -1).repeat(1, 2)


def by_overload_in_place(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    torch.ops.aten.cumsum_.default(out, 1)
    return out


def long_ones_differ(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[1] > LENGTH // 2 else x


def by_batch(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([each @ torch.eye(WIDTH, dtype=x.dtype) * 2 for each in x])


def changed_first(x: torch.Tensor) -> torch.Tensor:
    out = x * 1
    out[:, 0].mul_(2)
    return out


class Doubled(torch.autograd.Function):
    """A function of the user's, per token."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class MixedBackward(torch.autograd.Function):
    """Whose gradient alone reads across the sequence."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 - gradient.mean(1, keepdim=True)


#: What goes over a sequence, and whether it can be computed from pieces.
MIXES: dict[str, tuple[Function, bool]] = {
    # Per token, whatever the shapes.
    "gelu": (functional.gelu, True),
    "norm": (lambda x: functional.layer_norm(x, (WIDTH,)), True),
    "flattened": (lambda x: functional.gelu(x.reshape(-1, WIDTH)).view_as(x), True),
    "first_dim": (lambda x: functional.silu(x.transpose(0, 1).contiguous()).transpose(0, 1), True),
    "chunks": (lambda x: torch.cat([each.sin() for each in x.chunk(3, -1)], -1), True),
    "einsum": (lambda x: torch.einsum("bsd,de->bse", x, torch.eye(WIDTH, dtype=x.dtype)), True),
    "written": (written, True),
    "in_place": (lambda x: (x * 1).add_(1).mul_(0.5), True),
    "positions": (at_positions, True),
    "by_batch": (by_batch, True),
    "topk": (lambda x: x * (x >= x.topk(4, -1).values[..., -1:]), True),
    "doubled": (Doubled.apply, True),
    # Attention.
    "full": (attended, True),
    "causal": (lambda x: attended(x, is_causal=True), True),
    "masked": (lambda x: attended(x, attn_mask=tril(x)), True),
    "banded": (banded, True),
    "biased": (biased, True),
    "latents": (latents, True),
    "scaled": (lambda x: attended(x, is_causal=True, scale=0.3), True),
    "windows": (lambda x: attended(x.view(-1, 4, WIDTH)).view_as(x), True),  # blocks have 4 tokens
    "long_windows": (lambda x: attended(x.view(-1, 8, WIDTH)).view_as(x), False),
    # Sums over the sequence, which ranks add up.
    "mean_kept": (lambda x: x + x.mean(1, keepdim=True), True),
    "sum": (lambda x: x * x.sum(1, keepdim=True).tanh(), True),
    "linear_attention": (linear_attention, True),
    "square_norm": (lambda x: x / x.square().sum(dim=(1, 2), keepdim=True).sqrt(), True),
    # What reads across it otherwise.
    "by_hand": (by_hand, False),
    "cumsum": (lambda x: x.cumsum(1), False),
    "cummax": (lambda x: x.cummax(1).values, False),
    "softmax": (lambda x: x.softmax(1), False),
    "maximum": (lambda x: x - x.amax(1, keepdim=True), True),
    "deviation": (lambda x: x / x.std(1, keepdim=True), True),
    "norm_along": (lambda x: functional.normalize(x, dim=1), False),
    "flip": (lambda x: x.flip(1), True),  # of the blocks that a rank has, the last is the first
    "roll": (lambda x: x.roll(1, 1), True),
    "last": (lambda x: x + x[:, -1:], True),
    "first": (lambda x: x + x[:, :1], True),
    "cut_off": (lambda x: functional.pad(x[:, :-1], (0, 0, 1, 0)), True),
    "every_second": (lambda x: x[:, ::2].repeat(1, 2, 1), True),
    "every_second_twice": (lambda x: x[:, ::2].repeat_interleave(2, 1), True),
    "difference": (lambda x: x.diff(dim=1, prepend=x[:, :1]), False),
    "pooled": (lambda x: functional.avg_pool1d(x.mT, 3, 1, 1).mT, False),
    "sorted": (lambda x: x.sort(1).values, False),
    "fourier": (lambda x: torch.fft.fft(x, dim=1).real, False),
    "changed_first": (changed_first, False),
    "scaled_by_length": (lambda x: attended(x, scale=1 / math.log(x.shape[1])), True),
    "mean_of_some": (lambda x: x + torch.where(x > 0, x, torch.nan).nanmean(1, True), True),
    "mean_of_few": (lambda x: torch.where(x > 0, x, torch.nan).nanmean((1, 2)).mean() * x, True),
    "ranked": (lambda x: x * (x * 0).argmax(-1, keepdim=True).roll(1, 1), True),
    "gram": (lambda x: x @ (x.mT @ x) / LENGTH, True),
    "gram_of_rows": (lambda x: x * (x @ x.mT).sum((1, 2), keepdim=True), False),
    "shifted_in_place": (shifted_in_place, False),
    "unfolded": (lambda x: x.unfold(1, 2, 1).sum(-1).repeat(1, 2, 1)[:, :LENGTH], False),
    "any_rows": (lambda x: x * (x > 2).any(1, keepdim=True), True),
    "kept_rows": (lambda x: x + x[x.sum(-1) > 0].mean(), False),
    "asked": (lambda x: x * 2 if bool((x > 0).all()) else x, True),
    "compared": (lambda x: x * 2 if torch.equal(x, x.abs()) else x, False),
    "by_name": (lambda x: torch.ops.aten.cumsum(x, 1), False),
    "by_overload": (lambda x: torch.ops.aten.cumsum.default(x, 1), False),
    "by_overload_in_place": (by_overload_in_place, False),
    "by_numpy": (lambda x: x * torch.from_numpy(x.detach().numpy().cumsum(1)), False),
    "mapped": (lambda x: torch.vmap(lambda each: each.cumsum(0))(x), False),
    "mapped_tokens": (lambda x: torch.vmap(lambda each: each * 2)(x), False),
    "numbers": (lambda x: x * x.flatten()[0].item(), True),
    "by_length": (lambda x: x * x.shape[1], True),
    "long_ones_differ": (long_ones_differ, False),
    "mixed_backward": (MixedBackward.apply, False),
    "interleaved": (lambda x: x.view(x.shape[0], -1, 2, WIDTH).flip(2).view_as(x), True),
    "folded": (lambda x: x.view(x.shape[0], 2, -1, WIDTH).flip(1).view_as(x), False),
}


class Layer(nn.Module):
    """Something else than attention and linear layers, between these."""

    def __init__(self, mix: Function | nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.mix = mix
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.after(self.mix(self.before(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.mT).mT


class Convolved(nn.Module):
    def __init__(self, size: int, zero: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, size, padding=size // 2)
        if zero:
            nn.init.zeros_(self.conv.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.mT).mT


class MultiHead(nn.Module):
    def __init__(self, *, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Rotating(nn.Module):
    """Keeps what it has made of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[1], dtype=x.dtype)[:, None].sin()
        return x * self.table


class Keeping(nn.Module):
    """Adds what it was given in the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x if self.last is None else x + self.last
        self.last = x.detach()
        return out


MODULES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "gru": (Recurrent, False),
    "conv": (functools.partial(Convolved, 3), False),
    "zero_conv": (functools.partial(Convolved, 3, True), False),
    "point_conv": (functools.partial(Convolved, 1), True),
    "batch_norm": (Normalised, False),
    "weights": (functools.partial(MultiHead, need_weights=True), False),
    "no_weights": (functools.partial(MultiHead, need_weights=False), False),
    "rotating": (Rotating, True),
    "keeping": (Keeping, False),
}


class Net(nn.Module):
    """A language model around a layer."""

    def __init__(self, layer: nn.Module, place: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.attention = Layer(functools.partial(attended, is_causal=True))
        self.layer = layer
        self.place = place
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1]))
        x = self.layer(x) if self.place == "first" else self.attention(x)
        x = self.attention(x) if self.place == "first" else self.layer(x)
        return self.head(x)


def tokens_of(count: int = EXAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens, and labels of which an uneven number does not count."""
    draws = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=draws)
    labels = torch.randint(VOCABULARY, (count, LENGTH), generator=draws)
    labels[0, :5] = -100
    labels[-1, 9:] = -100
    return tokens, labels


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def differences(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    microbatches: int = 2,
    steps: int = 2,
) -> float:
    """Returns by how much losses and gradients differ from those of one process."""

    def own(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(model(tokens), labels)

    compute = loss or own
    torch.manual_seed(3)
    plain = make().double()
    torch.manual_seed(3)
    mine = make().double()
    model = smp.DistributedModel(mine)

    @smp.step(sequence_dims={"tokens": 1, "labels": 1})
    def train(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        value = compute(model, tokens, labels)
        model.backward(value)  # type: ignore[operator]
        return value

    tokens, labels = tokens_of()
    worst = 0.0
    for _ in range(steps):
        plain.zero_grad()
        model.zero_grad()
        expected = []
        for part, own_labels in zip(
            tokens.chunk(microbatches), labels.chunk(microbatches), strict=True
        ):
            value = compute(plain, part, own_labels)
            (value / microbatches).backward()
            expected.append(value.detach())
        got = train(model, tokens, labels).stack()
        worst = max(worst, float((got - torch.stack(expected)).abs().max()))
        worst = max(worst, of_gradients(plain, model))
    return worst


def of_gradients(plain: nn.Module, model: smp.DistributedModel) -> float:
    """Returns by how much gradients of this rank's parameters differ from those of one process."""
    expected = dict(plain.named_parameters())
    worst = 0.0
    for name, has in model.local_named_parameters():
        want = expected[name]
        assert (want.grad is None) == (has.grad is None), name
        if want.grad is not None and has.grad is not None:
            worst = max(worst, float((want.grad - has.grad).abs().max()))
    return worst


def verdicts(place: str, names: list[str]) -> dict[str, str]:
    """Returns for each mix, or module, whether it was exact, wrong, or refused by name."""
    torch.set_default_dtype(torch.float64)
    found = {}
    try:
        for name in names:
            make = functools.partial(_net, name, place)
            try:
                worst = differences(make, steps=1 if name in MIXES else 2)
            except UnsupportedError as error:
                is_named = "context_cases.py:" in str(error) or "/" in str(error)
                found[name] = "refused" if is_named else f"refused without a place: {error}"
            else:
                found[name] = "exact" if worst < 1e-12 else f"wrong by {worst}"
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def _net(name: str, place: str) -> nn.Module:
    if name in MIXES:
        return Net(Layer(MIXES[name][0]), place)
    return Net(Layer(MODULES[name][0]()), place)


def expected(*, is_piped: bool = False) -> dict[str, str]:
    """Returns the right verdicts."""
    cases = {name: fits for name, (_, fits) in (MIXES | MODULES).items()}
    if is_piped:  # modules are tried on stand-ins, which have no numbers
        cases |= dict.fromkeys(("asked", "numbers"), False)
    return {name: "exact" if fits else "refused" for name, fits in cases.items()}


# ---------------------------------------------------------------- models of Transformers


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    given = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**given | options))


def grouped() -> nn.Module:
    """A Llama of which two heads of queries share one of keys."""
    return llama(num_key_value_heads=2)


def windowed() -> nn.Module:
    """A Qwen whose layers look back four tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=4,
            max_window_layers=0,
        )
    )


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop"), dropout)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=2,
        n_head=4,
        n_positions=32,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        **drops,
    )
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    """Whose attention sees the whole sequence."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=24,
            max_position_embeddings=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def of_transformers(
    make: Callable[[], nn.Module], *, padded: bool, microbatches: int, checkpointed: bool = False
) -> float:
    """Returns by how much losses and gradients of two steps differ from those of one process.

    In the first step no token is padding, so the second one takes another way where it is. Its
    length does not divide.
    """
    torch.set_default_dtype(torch.float64)
    try:
        return _of_transformers(make, padded, microbatches, checkpointed)
    finally:
        torch.set_default_dtype(torch.float32)


def _of_transformers(
    make: Callable[[], nn.Module], padded: bool, microbatches: int, checkpointed: bool
) -> float:
    torch.manual_seed(3)
    plain = make()
    torch.manual_seed(3)
    mine = make()
    if checkpointed:
        mine.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    model = smp.DistributedModel(mine)
    model.train()

    @smp.step
    def train(model: nn.Module, **batch: torch.Tensor) -> Any:
        out = model(**batch, use_cache=False)
        model.backward(out.loss)  # type: ignore[operator]
        return out.loss, out.logits

    tokens, labels = tokens_of(EXAMPLES * smp.dp_size())
    own = slice(smp.dp_rank() * EXAMPLES, (smp.dp_rank() + 1) * EXAMPLES)
    worst = 0.0
    for step in range(2):
        batch = {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}
        if step and padded:
            batch = {key: each[:, :13] for key, each in batch.items()}
            batch["attention_mask"][1::2, 11:] = 0
            batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
        plain.zero_grad()
        model.zero_grad()
        losses, logits = train(model, **{key: each[own] for key, each in batch.items()})
        count = microbatches * smp.dp_size()
        outs = [
            plain(**{key: each.chunk(count)[part] for key, each in batch.items()}, use_cache=False)
            for part in range(count)
        ]
        (sum(out.loss for out in outs) / count).backward()
        here = outs[smp.dp_rank() * microbatches : (smp.dp_rank() + 1) * microbatches]
        want = torch.cat([out.logits for out in here])
        worst = max(worst, float((logits.concat() - want).abs().max()))
        # Losses of Transformers are in single precision.
        want = torch.stack([out.loss for out in here])
        worst = max(worst, 1e-8 * float((losses.stack() - want).abs().max()))
        worst = max(worst, of_gradients(plain, model))
    return worst


def trained(dropout: float, *, reentrant: bool = False, offloads: bool = False) -> list[float]:
    """Returns the losses of a GPT-2 that is trained, the norms of its gradients, and its sum.

    Its blocks are computed again in the backward pass.

    Args:
        dropout: of its blocks.
        reentrant: how they are checkpointed.
        offloads: what they keep leaves the device meanwhile; how much is returned, too.
    """
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        module = gpt2(dropout)
        module.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        model = smp.DistributedModel(module)
        model.train()
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

        @smp.step
        def train(model: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
            if smp.pp_size() > 1:
                model.backward(loss)  # type: ignore[operator]
            else:
                loss.backward()
            return loss

        torch.manual_seed(5)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            found.append(float(train(model, *tokens_of()).reduce_mean()))
            found.append(float(nn.utils.clip_grad_norm_(model.parameters(), 10.0)))
            optimizer.step()
        found.append(sum(float(each.abs().sum()) for each in model.state_dict().values()))
        return [*found, train.activation_memory().stored_bytes] if offloads else found
    finally:
        torch.set_default_dtype(torch.float32)
