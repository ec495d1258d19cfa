"""Layers that run two slices of a batch in lockstep give what they give on whole batches.

A hook of the user's on a layer has them run as they are written, on whole batches.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from tensor_cases import (
    CAUSAL,
    LENGTH,
    SIZES,
    WIDTH,
    assert_near,
    language_model,
    lm_loss,
    slice_itself,
)
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn import in_turn

#: Examples of each rank in one microbatch; those of more ranks begin again.
BATCHES = ((2, 2), (4, 4), (3, 2), (2, 5), (7, 3), (1, 4), (2, 1))
NORMS: tuple[dict[str, Any], ...] = (
    CAUSAL,
    {},
    {"pre_layernorm": True, "fp32_residual_addition": True},
)
#: Kernels of GPUs for slices sum in another order than those for whole batches.
IS_OTHER_ORDER = torch.cuda.is_available()
#: Of them all in half precision, where slices round less often, and sums in another order differ.
ROUNDING = {torch.float32: 1.0, torch.bfloat16: 1e4}
#: Of the largest gradient, below which others are rounding.
FLOOR = {torch.float32: 1e-2 if IS_OTHER_ORDER else 1e-3, torch.bfloat16: 1e-2}


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the runs of layers in slices."""
    found: Counter[str] = Counter()
    run = in_turn._Lockstep.run

    def count(self: Any, layers: Any) -> Any:
        found["sliced"] += 1
        return run(self, layers)

    with mock.patch.object(in_turn._Lockstep, "run", count):
        yield found


def gradients(
    model: Any, train: Any, given: list[Any], *, whole: bool
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Returns losses, gradients, and how often layers ran in slices."""
    layers = [
        each for each in model.modules() if isinstance(each, smp.nn.DistributedTransformerLayer)
    ]
    handles = [
        layers[0].register_forward_hook(lambda module, args, output: None) for _ in range(whole)
    ]
    model.zero_grad()
    torch.manual_seed(5)  # of the step
    with counted() as found:
        losses = [each.item() for each in train(model, *given).outputs]
    for handle in handles:
        handle.remove()
    got = {
        name: slice_itself(each.grad).clone()
        for name, each in model.local_named_parameters()
        if each.grad is not None
    }
    return losses, got, found["sliced"]


def compare(model: Any, train: Any, given: list[Any], about: object) -> int:
    """Compares both ways; returns how often layers ran in slices."""
    dtype = next(iter(model.local_parameters())).dtype
    losses, got, sliced = gradients(model, train, given, whole=False)
    expected, wanted, none = gradients(model, train, given, whole=True)
    assert not none, about
    for loss, want in zip(losses, expected, strict=True):
        assert abs(loss - want) <= 2e-6 * ROUNDING[dtype] * abs(want), (about, loss, want)
    of = max(each.float().norm().item() for each in wanted.values()) * ROUNDING[dtype]
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        difference = (got[name].float() - want.float()).norm().item()
        allowed = 5e-6 * max(want.float().norm().item() * ROUNDING[dtype], FLOOR[dtype] * of)
        assert difference <= allowed, (about, name, difference, allowed)
    return sliced


@smp.step
def train_lm(model: Any, ids: Any, hidden: Any, states: Any, kinds: Any) -> torch.Tensor:
    loss = lm_loss(model, ids, hidden, states, kinds)
    model.backward(loss)
    return loss


@smp.step
def train_without_mask(model: Any, ids: Any, hidden: Any, states: Any, kinds: Any) -> torch.Tensor:
    # One rank has a mask, the others none.
    mask = hidden if smp.tp_rank() == 1 else None
    loss = lm_loss(model, ids, mask, states, kinds)
    model.backward(loss)
    return loss


@smp.step
def train_states(model: Any, ids: Any, hidden: Any, states: Any, kinds: Any) -> torch.Tensor:
    dtype = next(iter(model.local_parameters())).dtype
    masks: list[Any] = [
        None,
        hidden[:1].to(dtype)[:, None, None] * -100,
        hidden.to(dtype)[:, None, None].expand(-1, SIZES["num_attention_heads"], -1, -1) * -50,
    ]
    result, _ = model((states.to(dtype), masks[kinds.shape[0] % 3]))
    # Weighed: the mean square of a normed result is a constant, and its gradient rounding alone.
    loss = (result.float() * torch.linspace(-1, 2, WIDTH)).square().mean()
    model.backward(loss)
    return loss


def examples(count: int) -> list[torch.Tensor]:
    """Returns the examples of this rank, of all microbatches."""
    draws = torch.Generator("cpu").manual_seed(17 + smp.tp_rank())
    shape = (count, LENGTH)
    made = [
        torch.randint(0, 48, shape, generator=draws, device="cpu"),
        (torch.rand(shape, generator=draws, device="cpu") < 0.3).long(),
        torch.randn(*shape, WIDTH, generator=draws, device="cpu"),
        torch.randint(0, 2, shape, generator=draws, device="cpu"),
    ]
    return [each.to(torch.get_default_device()) for each in made]


def transformer(**options: Any) -> nn.Module:
    return smp.nn.DistributedTransformer(**{**SIZES, "num_layers": 3, **options})


def population(first: int = 0, stride: int = 1) -> dict[str, int]:
    """Tries combinations, each with some batches; returns how many ran in slices and not.

    Args:
        first: of those to try.
        stride: from one to the next.
    """
    found: Counter[str] = Counter()
    batches = itertools.cycle(BATCHES)
    cases = [
        case
        for case in itertools.product(
            ROUNDING, (language_model, transformer), NORMS, (0.0, 0.2), (None, "each", "contiguous")
        )
        if case[0] == torch.float32 or case[2] is CAUSAL
    ]
    for dtype, build, norms, dropout, strategy in cases[first::stride]:
        torch.manual_seed(3)
        module = build(**norms, hidden_dropout_prob=dropout).to(dtype)
        model = smp.DistributedModel(module)
        if strategy is not None:
            smp.set_activation_checkpointing(
                getattr(module, "transformer", module).seq_layers,
                pack_args_as_tuple=True,
                strategy=strategy,
            )
        for number in range(2):
            batch = next(batches)
            train: Any = train_states
            if build is language_model:
                train = train_lm if number else train_without_mask
            sizes = [batch[rank % 2] for rank in range(smp.tp_size())]
            given = examples(sizes[smp.tp_rank()] * smp.state.cfg.microbatches)
            about = (build.__name__, norms, dropout, strategy, dtype, sizes)
            sliced = compare(model, train, given, about)
            assert bool(sliced) == (min(sizes) > 1), about
            found["sliced" if sliced else "whole"] += 1
        del model, module
    return dict(found)


class _Doubled(smp.nn.DistributedTransformerLayer):
    """A user's: what it is called for is not known."""

    def forward(self, inputs: Any) -> Any:
        hidden, mask = super().forward(inputs)
        return hidden * 2, mask


def changed_layers() -> list[str]:
    """What users change runs as they wrote it; also if one rank alone has changed something."""
    tried = []

    def hook_on_one(layers: nn.Sequential) -> None:
        if smp.tp_rank() == 0:
            layers[1].output.register_forward_pre_hook(lambda module, args: None)

    def other_norm(layers: nn.Sequential) -> None:
        class Norm(nn.LayerNorm):
            pass

        layers[0].output.pre_layernorm.__class__ = Norm

    def own_forward(layers: nn.Sequential) -> None:
        forward = layers[1].forward
        layers[1].forward = lambda inputs: forward(inputs)

    def subclass(layers: nn.Sequential) -> None:
        layers[1].__class__ = _Doubled

    def attention_dropout(layers: nn.Sequential) -> None:
        layers[0].attention.attention_dropout.p = 0.5

    def nothing(layers: nn.Sequential) -> None:
        pass

    def marked_layer(layers: nn.Sequential) -> None:
        smp.set_activation_checkpointing(layers[0])

    for change in (
        nothing,
        hook_on_one,
        other_norm,
        own_forward,
        subclass,
        attention_dropout,
        marked_layer,
    ):
        torch.manual_seed(3)
        module = language_model(**CAUSAL)
        model = smp.DistributedModel(module)
        change(module.transformer.seq_layers)
        sliced = compare(model, train_lm, examples(8), change.__name__)
        assert bool(sliced) == (change is nothing), change.__name__
        tried.append(change.__name__)
        del model, module
    return tried


def in_evaluation() -> None:
    """Outside of a step, without gradients, results are the same."""
    torch.manual_seed(3)
    module = language_model(**CAUSAL, hidden_dropout_prob=0.5)
    model = smp.DistributedModel(module)
    model.eval()
    ids, hidden, *_ = examples(3)
    with torch.no_grad(), counted() as found:
        got = model((ids, hidden, None, None, None))
        module.transformer.seq_layers[0].register_forward_hook(lambda module, args, output: None)
        want = model((ids, hidden, None, None, None))
    assert found["sliced"] == 1
    assert_near(got, want, "logits", want.norm().item())


def parts_of_graphs() -> None:
    """A loss of one example, and a graph that is differentiated twice, outside of a step."""
    torch.manual_seed(3)
    module = transformer(**CAUSAL)
    ids, _, states, _ = examples(4)
    del ids
    found = []
    for whole in (False, True):
        if whole:
            module.seq_layers[0].register_forward_hook(lambda module, args, output: None)
        module.zero_grad()
        with counted() as number:
            result, _ = module((states, None))
        assert bool(number["sliced"]) != whole
        loss = result[0].square().mean()
        loss.backward(retain_graph=True)
        once = [each.grad.clone() for each in module.parameters()]
        loss.backward()
        found.append([*once, *(each.grad for each in module.parameters())])
    of = max(each.norm().item() for each in found[1])
    for got, want in zip(*found, strict=True):
        assert_near(got, want, "a gradient", of)


def changed_before_backward() -> None:
    """Checkpointed layers are computed again as they were at first, whatever has changed since."""
    torch.manual_seed(3)
    module = transformer(**CAUSAL)
    smp.set_activation_checkpointing(
        module.seq_layers, pack_args_as_tuple=True, strategy="contiguous"
    )
    _, _, states, _ = examples(4)
    found = []
    for whole in (False, True):
        module.zero_grad()
        handles = []

        def hook(handles: Any = handles) -> None:
            layer = module.seq_layers[1]
            handles.append(layer.register_forward_hook(lambda module, args, output: None))

        if whole:
            hook()
        result, _ = module((states, None))
        if whole:
            handles[0].remove()
        else:
            hook()
        with counted() as number:
            result.square().mean().backward()
        assert bool(number["sliced"]) != whole
        handles[0].remove()
        found.append([each.grad for each in module.parameters()])
    of = max(each.norm().item() for each in found[1])
    for got, want in zip(*found, strict=True):
        assert_near(got, want, "a gradient", of)
