"""Models that are split by ``auto=True`` must compute what one process computes.

Long, since it is one list of models and cases.
"""

from __future__ import annotations

import functools
import gc
import logging
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import tensor_cases
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from world import generator

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensorMode
from smdistributed.modelparallel.torch.tape.recording import Recording
from smdistributed.modelparallel.torch.tape.tape import Call
from smdistributed.modelparallel.torch.tensor_parallel import replacement
from smdistributed.modelparallel.torch.tensor_parallel.auto import proof
from smdistributed.modelparallel.torch.tensor_parallel.auto.group import ClosedGroup

WIDTH, HEADS, VOCAB, LENGTH = 32, 4, 48, 7
MICROBATCHES = tensor_cases.MICROBATCHES


class FeedForward(nn.Module):
    def __init__(self, inner: int = 40) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(F.silu(self.gate(x)) * self.up(x)))


class Attention(nn.Module):
    """Counts its heads; drops probabilities, and from what it returns; may have a mask."""

    def __init__(self, rate: float = 0.2) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(rate)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        shape = (*x.shape[:2], self.num_heads, WIDTH // HEADS)
        query, key, value = (
            each(x).view(shape).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        rate = self.dropout.p if self.training else 0.0
        seen = F.scaled_dot_product_attention(
            self.norm(query), self.norm(key), value, mask, dropout_p=rate
        )
        return self.dropout(self.out(seen.transpose(1, 2).flatten(2)))


class FusedFeedForward(nn.Module):
    """Its gate and what it gates are one map."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class FusedAttention(nn.Module):
    """Query, key and value are one map; there are fewer keys than queries."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_heads = HEADS, HEADS // 2
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        made, of_one = self.qkv(x), WIDTH // HEADS
        first = self.num_heads * of_one
        second = first + self.num_key_heads * of_one
        query, key, value = (
            each.unflatten(-1, (-1, of_one)).transpose(1, 2)
            for each in (made[..., :first], made[..., first:second], made[..., second:])
        )
        rate = self.dropout.p if self.training else 0.0
        seen = F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p=rate, enable_gqa=True
        )
        return self.out(seen.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.attention = FusedAttention() if fused else Attention()
        self.feed_forward = FusedFeedForward() if fused else FeedForward()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), mask)
        return x + self.dropout(self.feed_forward(self.norms[1](x)))


class Own(nn.Module):
    """A user's model, of which nobody knows the blocks; its batches may bring a mask.

    Its second block has fused maps; its last one is torch's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(fused=fused) for fused in (False, True))
        self.last = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.2, batch_first=True)
        options: dict[str, Any] = {"add_bias_kv": True, "batch_first": True}
        self.last.self_attn = nn.MultiheadAttention(WIDTH, HEADS, 0.2, **options)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, padded: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(ids)
        mask = None if padded is None else ~padded.bool()[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        x = self.last(x, src_key_padding_mask=None if padded is None else padded.bool())
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Early(FeedForward):
    """Drops from its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.dropout(x))


class Turned(nn.Module):
    """Gives a block an input that lies in memory with the positions first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Early()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x + self.inner(x.transpose(0, 1).contiguous().transpose(0, 1))


class CheckpointedInside(nn.Module):
    """Two layers in one module, of which it has torch compute parts again."""

    def __init__(self, again: str, use_reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)])
        self.second = nn.ModuleList([nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)])
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.3)
        self.again, self.use_reentrant = again, use_reentrant

    def layer(self, x: torch.Tensor, name: str) -> torch.Tensor:
        one, other = self.get_submodule(name)
        inner = self.dropout(one(self.norm(x)).tanh())
        return x + self.dropout(other(inner))

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return self._layer("second", self._layer("first", x))

    def _layer(self, name: str, x: torch.Tensor) -> torch.Tensor:
        layer = functools.partial(self.layer, name=name)
        return self._called(layer, x) if self.again == name else layer(x)

    def _called(self, part: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            return part(x)
        found: torch.Tensor = checkpoint(part, x, use_reentrant=self.use_reentrant)
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._called(self.both, x) if self.again == "both" else self.both(x)


class Dropping(Own):
    """Has a last block that goes by how its input lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Turned())


def own_loss(model: Any, ids: Any, hidden: Any, states: Any, kinds: Any) -> torch.Tensor:
    hidden = hidden.clone()
    hidden[:, :1] = 0  # a row without any key would be undefined
    loss: torch.Tensor = model(ids, hidden)
    return loss


def without_dropout(module: nn.Module) -> nn.Module:
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
        elif isinstance(each, nn.MultiheadAttention):
            each.dropout = 0.0
    return module


def groups_in(module: nn.Module) -> list[str]:
    """Returns the names of the modules that were split as they are."""
    return [name for name, each in module.named_modules() if "_smp_found" in vars(each)]


def split(make: Callable[[], nn.Module], seed: int, **options: Any) -> nn.Module:
    """Returns a marked model; what the first rank draws counts."""
    torch.manual_seed(seed + smp.tp_rank())
    with smp.tensor_parallelism(auto=True, **options):
        return make()


def whole(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


BLOCKS = [f"blocks.{n}.{name}" for n in range(2) for name in ("attention", "feed_forward")]
BLOCKS.append("last")


def trained() -> None:
    """Values, losses, gradients and whole states are those of one process."""
    prescaled = smp.state.cfg.prescaled_batch
    module = split(Own, 30)
    model = smp.DistributedModel(without_dropout(module))
    reference = without_dropout(whole(Own, 30))
    # With a prescaled batch, what has parameters of its own beside linear maps is no group; four
    # ranks cannot share two heads.
    absent = {BLOCKS[0], "last"} if prescaled else {BLOCKS[2]} if smp.tp_size() == 4 else set()
    expected = [] if smp.tp_size() == 1 else [each for each in BLOCKS if each not in absent]
    expected += ["last.self_attn"] if prescaled else []
    assert groups_in(module) == expected
    assert type(module.head).__name__ == "WideningLinear"
    batch = tensor_cases.data()
    expected = tensor_cases.run_reference(reference, own_loss, batch, even=prescaled)
    own = tensor_cases.feeders()[1]
    share = tensor_cases.share_of(own, batch, even=prescaled)
    found = tensor_cases.step_of(own_loss)(model, *share.values())
    state = model.state_dict()
    assert state.keys() == reference.state_dict().keys()
    for key, value in reference.state_dict().items():
        assert tensor_cases.same(state[key], value), key
    for got, want in zip(found.outputs, expected[own], strict=True):
        assert abs(got.item() - want) <= 2e-6 * abs(want), (got, want)
    tensor_cases.compare_gradients(model, reference)


def dropout_losses() -> list[float]:
    """Returns the losses of all microbatches of a model that drops, as one process has them."""
    gc.collect()  # models that still live have a place in the keys of random numbers
    model = smp.DistributedModel(split(Dropping, 31) if smp.tp_size() > 1 else whole(Dropping, 31))
    train = tensor_cases.step_of(own_loss)
    size = smp.tp_size()
    losses: list[float] = []
    for _ in range(2):  # in its first call a module shows what it draws
        lanes = (MICROBATCHES, size, -1) if size > 1 else (1, 1, -1)
        parts = [
            each.unflatten(0, lanes)[:, smp.tp_rank()].flatten(0, 1)
            for each in tensor_cases.data().values()
        ]
        # Kernels of GPUs that fuse attention draw in an order of their own.
        with sdpa_kernel(SDPBackend.MATH):
            own = [each.item() for each in train(model, *parts).outputs]
        everyones = smp.allgather(own, smp.TP_GROUP)
        losses += [loss for together in zip(*everyones, strict=True) for loss in together]
        model.zero_grad()
    return losses


def checkpointed() -> None:
    """Groups that are computed again exchange again, and draw what they drew."""
    losses, gradients = [], []
    for again in (False, True):
        model = smp.DistributedModel(split(Own, 9))
        if again:
            smp.set_activation_checkpointing(model.get_module().blocks)
        share = tensor_cases.share_of(tensor_cases.feeders()[1], tensor_cases.data(), even=False)
        found = tensor_cases.step_of(own_loss)(model, *share.values())
        losses.append([each.item() for each in found.outputs])
        gradients.append({key: each.grad for key, each in model.local_named_parameters()})
        del model  # the next has its place in the keys of random numbers
    assert losses[0] == losses[1]
    for name, gradient in gradients[0].items():
        tensor_cases.assert_close(gradients[1][name], gradient, name)


def checkpointed_inside() -> None:
    """What code in a group checkpoints uses slices again, sums and draws as it did."""

    @smp.step
    def train(model: Any, states: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(states).square().mean()
        model.backward(loss)
        return loss

    for again in ("second", "both"):
        found = []
        for use_reentrant in (None, False, True):
            gc.collect()  # models that still live have a place in the keys of random numbers
            make = functools.partial(CheckpointedInside, again, use_reentrant)
            model = smp.DistributedModel(split(lambda make=make: nn.Sequential(make()), 4))
            assert isinstance(model.get_module()[0], ClosedGroup)
            torch.manual_seed(smp.tp_rank())
            states = torch.randn(4, 3, WIDTH).requires_grad_()
            loss = train(model, states).reduce_mean()
            gradients = {key: each.grad for key, each in model.local_named_parameters()}
            found.append((loss, gradients))
            del model
        for loss, gradients in found[1:]:
            assert loss == found[0][0]
            for name, gradient in gradients.items():
                tensor_cases.assert_close(gradient, found[0][1][name], f"{again}: {name}")


def delayed() -> None:
    """Slices of delayed parameters get the values of an immediate construction."""
    torch.manual_seed(20 + smp.tp_rank())
    with smp.model_creation(tensor_parallelism=True, auto=True), smp.delay_param_initialization():
        module = Own()
    model = smp.DistributedModel(without_dropout(module))
    assert groups_in(module) == BLOCKS
    share = tensor_cases.share_of(tensor_cases.feeders()[1], tensor_cases.data(), even=False)
    tensor_cases.step_of(own_loss)(model, *share.values())
    state = model.state_dict()
    for key, value in whole(Own, 20).state_dict().items():
        assert tensor_cases.same(state[key], value), key


def saved_losses(path: str, *, resume: bool) -> list[float]:
    """Trains around a checkpoint, or resumes from it; the model needs no auto to read it."""

    def make() -> nn.Module:
        return without_dropout(split(Own, 4) if smp.tp_size() > 1 else whole(Own, 4))

    return tensor_cases.losses_around_checkpoint(make, own_loss, path, resume=resume)


class Sums(nn.Module):
    """Its norm needs all channels: slices would be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 24), nn.LayerNorm(24)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


class Twice(nn.Module):
    """Adds its input, which each rank would add."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Noisy(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x + torch.rand_like(x)).relu())


class Scores(nn.Module):
    """Leaves split: three maps, and nothing that sums."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.query, self.key, self.value = (nn.Linear(WIDTH, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        weights = (query @ key.mT).softmax(-1)
        return (weights @ value).transpose(1, 2).flatten(2), weights


class Tied(nn.Module):
    """Reads a weight that it also calls, by itself: nobody would share out its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.up(x) * self.gate(x)) @ self.up.weight


class Attends(nn.Module):
    """Calls torch's attention in the ways in which it may be called."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, **options)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        length, hidden = x.shape[1], torch.zeros(x.shape[:2], dtype=torch.bool)
        hidden[0, -1] = True
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        by_head = torch.randn(x.shape[0] * HEADS, length, length, generator=generator(1))
        found = []
        if self.inner.batch_first:
            found += self.inner(x, x, x, hidden, need_weights=False)
            found += self.inner(x, x.flip(1), x.flip(1), attn_mask=ahead, key_padding_mask=hidden)
            found += self.inner(x, x, x, attn_mask=by_head, average_attn_weights=False)
            found += self.inner(x, x, x, attn_mask=ahead, is_causal=True, need_weights=False)
        else:
            keys, values = x[..., : self.inner.kdim], x[..., : self.inner.vdim]
            found += self.inner(x, keys, values)
            found += self.inner(x[0], keys[0], values[0], attn_mask=ahead)
        return tuple(each for each in found if each is not None)


class Heads(nn.Module):
    """Counts heads, for all that have it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Counted(nn.Module):
    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.heads(each(x)) for each in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


def sharing_heads() -> nn.Module:
    heads = Heads()
    return nn.Sequential(Counted(heads), Counted(heads))


class Odd(Twice):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)


KINDS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "closed": (FeedForward, True),
    "split": (Scores, True),
    "norm over channels": (Sums, True),
    "residual": (Twice, False),
    "reads a weight": (Tied, False),
    "heads counted for both": (sharing_heads, False),
    "heads counted for one": (lambda: nn.Sequential(Counted(Heads())), True),
    "attention": (lambda: Attends(batch_first=True), True),
    "attention with more keys": (lambda: Attends(add_bias_kv=True, add_zero_attn=True), True),
    "attention of other widths": (lambda: Attends(kdim=12, vdim=20, bias=False), True),
    "random": (Noisy, False),
    "does not divide": (Odd, False),
    "torch's": (lambda: nn.TransformerEncoderLayer(WIDTH, 4, 24, 0.0, batch_first=True), True),
}


def kinds() -> None:
    """What slices cannot compute stays as it is but for its linear maps; all give their numbers."""
    draws = generator(3 + smp.tp_rank())
    for name, (make, is_group) in KINDS.items():
        module = split(make, 6)
        model, reference = smp.DistributedModel(module), whole(make, 6)
        assert bool(groups_in(model.get_module())) is is_group, name
        for each in (model, reference):
            each.eval()
        x = torch.randn(2 + smp.tp_rank(), 5, WIDTH, generator=draws)
        if name in ("random", "reads a weight"):
            continue
        got, want = model(x), reference(x)
        for one, other in zip(
            *(each if isinstance(each, tuple) else (each,) for each in (got, want)), strict=True
        ):
            tensor_cases.assert_close(one, other, name, rtol=1e-4, atol=1e-5)


class Encoder(nn.Module):
    """Torch's encoder, whose layers are copies of one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.0, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor, padded: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(x, src_key_padding_mask=padded)


def torchs_encoder() -> None:
    """Also where torch would give weights to kernels of its own, in place of calling modules."""
    module = split(Encoder, 6)
    model, reference = smp.DistributedModel(module), whole(Encoder, 6)
    assert groups_in(module) == [f"inner.layers.{n}" for n in range(2)]

    @smp.step
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    x = torch.randn(4, 5, WIDTH, generator=generator(8))
    for _ in range(2):  # then it is known that nothing draws
        train(model, x)
    padded = torch.zeros(4, 5, dtype=torch.bool)
    padded[1:, 3:] = True
    for each in (model, reference):
        each.eval()
    with torch.no_grad():
        for mask in (None, padded):
            got, want = (each(x, mask)[~padded] for each in (model, reference))
            tensor_cases.assert_close(got, want, str(mask), rtol=1e-4, atol=1e-5)


class Choosy(FeedForward):
    """Computes something else where it is told so, which slices cannot."""

    def forward(self, x: torch.Tensor, normed: bool = False) -> torch.Tensor:
        inner = F.silu(self.gate(x)) * self.up(x)
        return self.down(inner.softmax(-1) if normed else inner)


class Inner(nn.Module):
    """Calls a slice from outside of the module that it belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.block = FeedForward()

    def forward(self, x: torch.Tensor, aside: bool = False) -> torch.Tensor:
        return self.block.up(x) if aside else self.block(x)


def refused() -> None:
    """Calls that slices cannot compute are errors, on every rank; nothing hangs."""
    x = torch.randn(2, 3, WIDTH)
    model = smp.DistributedModel(split(Choosy, 1))
    assert groups_in(model.get_module()) == [""]
    model(x)
    with pytest.raises(SMPError, match=r"do not compute.*Exclude it"):
        model(x, normed=True)
    with pytest.raises(SMPError, match=r"same types; .*tp_rank 1: .*float64"):
        model(x.double() if smp.tp_rank() else x)
    with pytest.raises(SMPError, match="takes and returns tensors and plain values"):
        model(x, normed=object())
    with pytest.raises(SMPError, match="must call the same distributed modules"):
        model.train(bool(smp.tp_rank()))(x)
    inner = smp.DistributedModel(split(Inner, 1))
    with pytest.raises(SMPError, match="code outside of that module"):
        inner(x, aside=True)
    with (
        pytest.raises(TypeError, match="auto must be True or False"),
        smp.tensor_parallelism(auto=2),
    ):
        pass


def excluded() -> None:
    """Modules that the user excludes are whole; families keep their maps."""
    torch.manual_seed(2)
    with smp.tensor_parallelism(auto=True):
        module = Own()
    smp.set_tensor_parallelism(module.blocks[0], enabled=False)
    smp.DistributedModel(module)
    assert groups_in(module) == BLOCKS[2:]
    assert type(module.blocks[0].attention.query) is nn.Linear


class Asked(nn.Module):
    """Its blocks take more than one tensor, which nobody could guess."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(0.0)

    def forward(self, *, states: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        mask = scale[..., None].expand(-1, 1, 1, states.shape[1])
        return self.attention(states * scale, mask)


def sampled() -> None:
    """What a model is called with may be said."""
    inputs = {"states": torch.randn(2, 6, WIDTH), "scale": torch.rand(2, 1, 1)}
    module = split(Asked, 3, sample_inputs=inputs)
    model, reference = smp.DistributedModel(module), whole(Asked, 3)
    assert groups_in(module) == ["attention"]
    tensor_cases.assert_close(
        model.eval()(**inputs), reference.eval()(**inputs), "out", rtol=1e-4, atol=1e-5
    )


class Reads(nn.Module):
    """Reads the weight of a linear map in place of calling it; two others share theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.read = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.called.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.again(self.called(x)).relu(), self.read.weight)


class Experts(nn.Module):
    """Chooses a block by its data, which ranks have others of."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(FeedForward() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[int(x.mean() > 0)](x)


def kept_whole() -> None:
    """Slices of what is read, or called as data say, would be wrong: they stay whole."""
    x = torch.ones(2, 3, WIDTH) * (1 - 2 * smp.tp_rank())
    for make, name in ((Reads, "read"), (Experts, "experts.0.up"), (Tied, "up")):
        module = split(make, 3, sample_inputs=torch.ones(2, 3, WIDTH))
        model, reference = smp.DistributedModel(module), whole(make, 3)
        assert groups_in(module) == []
        assert type(module.get_submodule(name)) is nn.Linear
        tensor_cases.assert_close(model.eval()(x), reference.eval()(x), name, rtol=1e-4, atol=1e-5)


class Activated(nn.Module):
    """Computes with a module without parameters that it is given."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 40), act, nn.Linear(40, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


def activations_shared() -> None:
    """An activation may be shared, wherever it is made: by the import of a module, say."""
    x = torch.ones(2, 3, WIDTH) * (1 - 2 * smp.tp_rank())
    outside = nn.GELU()

    def make() -> nn.Module:
        shared = nn.GELU()
        return nn.Sequential(*(Activated(each) for each in (outside, outside, shared, shared)))

    module = split(make, 5, sample_inputs=x)
    model, reference = smp.DistributedModel(module), whole(make, 5)
    assert groups_in(module) == ["0", "1", "2", "3"]
    tensor_cases.assert_close(model.eval()(x), reference.eval()(x), "out", rtol=1e-4, atol=1e-5)

    hooked = split(make, 5, sample_inputs=x)
    seen: list[torch.Size] = []
    handle = outside.register_forward_hook(lambda *given: seen.append(given[2].shape))
    smp.DistributedModel(hooked).eval()(x)
    handle.remove()
    assert groups_in(hooked) == ["2", "3"]
    assert {size[-1] for size in seen} == {40}, "what a hook sees is whole"


class Numbered(nn.Module):
    """A layer that may compute by its number: one with an odd one is no group then."""

    def __init__(self, number: int, way: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.number, self.way = number, way

    @property
    def parity(self) -> int:
        return self.number % 2

    def is_odd(self) -> bool:
        ways: dict[str, Callable[[], int]] = {
            "attribute": lambda: self.number % 2,
            "property": lambda: self.parity,
            "getattr": lambda: getattr(self, "number", 0) % 2,
            "vars": lambda: vars(self)["number"] % 2,
            "dict": lambda: self.__dict__.get("number", 0) % 2,
        }
        return bool(ways[self.way]())

    def forward(self, x: torch.Tensor, asks: bool = False) -> torch.Tensor:
        inner = self.up(x)
        is_odd = (asks or self.way != "unread") and self.is_odd()
        return self.down(inner.softmax(-1) if is_odd else inner.relu())


def numbered() -> None:
    """Layers that differ in a number are proven once if nothing reads it, else each."""
    x = torch.randn(2, 3, WIDTH, generator=generator(3 + smp.tp_rank()))
    for way in ("unread", "attribute", "property", "getattr", "vars", "dict"):

        def make(way: str = way) -> nn.Module:
            return nn.Sequential(*(Numbered(number, way) for number in (1, 4, 3, 2)))

        tries = mock.Mock(wraps=proof._Trial)
        with mock.patch.object(proof, "_Trial", tries):
            module = split(make, 3, sample_inputs=torch.ones(2, 3, WIDTH))
            model, reference = smp.DistributedModel(module), whole(make, 3)
        groups = groups_in(model.get_module())
        # Once one was refused of a kind, none is tried that is not alike: they begin at the end.
        assert groups == (["0", "1", "2", "3"] if way == "unread" else ["3"]), (way, groups)
        assert (tries.call_count == 1) == (way == "unread"), (way, tries.call_count)
        got, want = model.eval()(x), reference.eval()(x)
        tensor_cases.assert_close(got, want, way, rtol=1e-4, atol=1e-5)

    class Asked(Numbered):
        def is_odd(self) -> bool:
            return self.number % 2 == 1

    module = split(lambda: nn.ModuleList(Asked(number, "unread") for number in range(2)), 3)
    smp.DistributedModel(module)
    assert groups_in(module) == ["0", "1"]
    module[0](x, asks=True)
    with pytest.raises(SMPError, match="its slices do not compute"):
        module[1](x, asks=True)


def agreed() -> None:
    """Ranks whose modules are others split them alike, or get an error on each; nothing hangs."""
    x = torch.randn(2, 3, WIDTH, generator=generator(3))
    given = torch.ones(2, 3, WIDTH)

    def made(number: int) -> nn.Module:
        return split(lambda: InTurn(Numbered(number, "attribute")), 3, sample_inputs=given)

    other = made(2 - smp.tp_rank())
    error = r"split blocks\.0 in the same way.* rank 1: no group: .*sum"
    with pytest.raises(SMPError, match=error):
        smp.DistributedModel(other)
    module = made(2)
    model = smp.DistributedModel(module)
    want = model(x)
    model.eval()(x)  # which is proven by itself
    number = module.get_submodule("blocks.0")
    number.number = 2 + 2 * smp.tp_rank()  # on one rank; it computes what it did
    assert torch.equal(model.train()(x), want)
    assert torch.equal(model.eval()(x), want), "each rank proves it again"
    model.train()
    number.number = 2 + smp.tp_rank()
    error = (
        "do not compute" if smp.tp_rank() else "same verdict on slices of blocks.0.*do not compute"
    )
    with pytest.raises(SMPError, match=error):
        model(x)


class InTurn(nn.Module):
    """Calls its blocks in turn."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.blocks.children():
            x = each(x)
        return x


class Uneven(nn.Module):
    """Has a width that two does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 41), nn.Linear(41, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def told() -> None:
    """The log has the reason of the attempt that looked for what the module is."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(replacement.__package__)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        smp.DistributedModel(split(Uneven, 3, sample_inputs=torch.ones(2, 3, WIDTH)))
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
    (line,) = [each for each in lines if "is no group" in each]
    assert re.search(r"\(2\) must divide out_features \(41\) of up", line), line
    (line,) = [each for each in lines if "of the parameters of the model stay whole" in each]
    assert re.match(r"\d+\.\d% of .* on every rank: down \(Linear\) \d+\.\d%, up ", line), line


def called_alike() -> None:
    """Of shapes alone a split module calls what it calls of tensors: compiled ones are told so."""
    model = smp.DistributedModel(split(FeedForward, 5)).eval()
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    called = []

    @smp.step(cuda_graphs=False)
    def look(model: Any, own: torch.Tensor) -> None:
        for given in (own, own, fakes.from_tensor(own)):  # the first call proves the slices
            recording = Recording(own.device, ("cpu",), [given], [], lambda each: each, fakes)
            with recording.recording():
                result = model(given)
            recording.end([result])
            assert not recording.tape.refusal, recording.tape.refusal
            calls = (each for each in recording.tape.events if isinstance(each, Call))
            called.append([each.function for each in calls])

    look(model, torch.randn(MICROBATCHES, 5, WIDTH, generator=generator(3)))
    assert called[0] == called[1] == called[2]
    assert len(called[0]) > 1


class Normed(nn.Module):
    """Calls a module that is split, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


def compiled() -> None:
    """Within a compiled module what lies between the exchanges of a split one is compiled, too.

    What it drops is what it drops as it is written, in a compiled module.
    """
    seen: set[str] = set()

    def backend(graph: Any, inputs: Any) -> Any:
        seen.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def losses(*, is_compiled: bool = True, are_lanes: bool = True, drops: bool) -> list[float]:
        torch.compiler.reset()
        module = split(lambda: nn.Sequential(Normed(), Normed()), 7)
        for block in module.children() if is_compiled else ():
            block.compile(backend=backend)
        model = smp.DistributedModel(module if drops else without_dropout(module))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

        @smp.step
        def step(own: torch.Tensor) -> torch.Tensor:
            loss = model(own).square().mean()
            model.backward(loss)
            return loss

        own = torch.randn(MICROBATCHES, 5, WIDTH, generator=generator(smp.tp_rank()))
        found = []
        for _ in range(3):
            for each in model.modules() if found and not are_lanes else ():
                if isinstance(each, ClosedGroup):
                    each.compile_lanes(None)
            found.append(float(step(own).reduce_mean()))
            optimizer.step()
            optimizer.zero_grad()
        return found

    torch.manual_seed(9)
    assert losses(drops=False) == pytest.approx(losses(is_compiled=False, drops=False))
    assert any("silu" in each for each in seen), seen
    torch.manual_seed(9)
    with_lanes = losses(drops=True)
    torch.manual_seed(9)
    assert with_lanes == losses(are_lanes=False, drops=True)


class Given(nn.Module):
    """Returns what it is given beside what its slices compute; all of that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(
        self, x: torch.Tensor | None = None, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        x = torch.ones(WIDTH, dtype=self.up.bias.dtype) if x is None else x
        hidden = self.up(x).relu()
        if scale is not None:
            hidden = hidden * scale.abs().unsqueeze(-1)
        return self.down(hidden), x


def given() -> None:
    """The own call has what it was given, of any type; what comes back may be changed in place."""
    model, reference = smp.DistributedModel(split(Given, 3).double()), whole(Given, 3).double()
    draws = generator(smp.tp_rank())
    parts = (torch.randn(3, 4, generator=draws, dtype=torch.float64) for _ in range(2))
    complex_ = torch.complex(*parts)
    numbers = torch.randn(3, 4, WIDTH, generator=draws, dtype=torch.float64)

    def changed(module: Any, *, with_gradients: bool) -> list[torch.Tensor]:
        x = numbers.clone().requires_grad_()
        hidden = (x * 2).transpose(0, 1).contiguous().transpose(0, 1)
        with torch.set_grad_enabled(with_gradients):
            result, same = module(hidden)
        same += 1  # which is what was given
        loss = hidden.square().sum() + (0 if with_gradients else result.sum())
        return [loss, *torch.autograd.grad(loss, x)]

    ways: list[Callable[[Any], list[torch.Tensor]]] = [
        lambda module: changed(module, with_gradients=True),
        lambda module: changed(module, with_gradients=False),
        lambda module: [module(numbers, complex_.conj())[0]],
        lambda module: [module(numbers, (complex_.real * 3).to(torch.int16))[0]],
        lambda module: [module(*(numbers,) * smp.tp_rank())[0]],  # one rank has no tensor
    ]
    for number, way in enumerate(ways):
        for got, want in zip(way(model), way(reference), strict=True):
            tensor_cases.assert_close(got, want, f"{number}", rtol=1e-9, atol=1e-12)


BEHAVIOUR = {
    each.__name__: each
    for each in (
        *(kinds, torchs_encoder, refused, excluded, checkpointed, checkpointed_inside, delayed),
        *(sampled, kept_whole),
        *(numbered, agreed, told, activations_shared, called_alike, compiled, given),
    )
}
PIPELINED = {each.__name__: each for each in (checkpointed, checkpointed_inside, delayed)}
