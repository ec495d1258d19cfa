"""Modules that are split over tensor-parallel ranks must compute what one process computes.

Long, since it is one list of cases.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from world import generator

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.torch.nn.linear import WideningLinear
from smdistributed.modelparallel.torch.parts.blocks import taken
from smdistributed.modelparallel.torch.sharding.parameter import gradient_here
from smdistributed.modelparallel.torch.tensor_parallel.group import TensorGroup
from smdistributed.modelparallel.torch.tensor_parallel.module import (
    distributed_modules_in,
)

MICROBATCHES = 2
TOLERANCE = 5e-6
VOCAB, WIDTH, HEADS, LENGTH = 48, 32, 4, 6
SIZES: dict[str, Any] = {
    "num_attention_heads": HEADS,
    "attention_head_size": 6,
    "hidden_size": WIDTH,
    "intermediate_size": 40,
    "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
CAUSAL: dict[str, Any] = {
    "causal_mask_size": 8,
    "pre_layernorm": True,
    "post_layernorm": False,
}


def language_model(**options: Any) -> smp.nn.DistributedTransformerLMHead:
    given = {**SIZES, "num_layers": 2, "vocab_size": VOCAB, "num_positions": 8, **options}
    return smp.nn.DistributedTransformerLMHead(**given)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, distributed modules are those of a process of its own."""
    with distributed_modules_in(TensorGroup()):
        yield


def data(num_examples: int = 8, **_: Any) -> dict[str, torch.Tensor]:
    """Returns the examples of all data-parallel ranks."""
    draws = torch.Generator("cpu").manual_seed(11)
    hidden = torch.rand(num_examples, LENGTH, generator=draws, device="cpu") < 0.3
    hidden[0] = True  # a row without any key
    shape = (num_examples, LENGTH)
    made = {
        "ids": torch.randint(0, VOCAB, shape, generator=draws, device="cpu"),
        "hidden": hidden.long(),
        "states": torch.randn(*shape, WIDTH, generator=draws, device="cpu"),
        "kinds": torch.randint(0, 2, shape, generator=draws, device="cpu"),
    }
    return {key: each.to(torch.get_default_device()) for key, each in made.items()}


def feeders() -> tuple[int, int]:
    """Returns how many ranks bring examples of their own, and which of them this is."""
    if smp.state.cfg.prescaled_batch:
        return smp.rdp_size(), smp.rdp_rank()
    return smp.dp_size(), smp.dp_rank()


def share_of(dp_rank: int, batch: dict[str, torch.Tensor], *, even: bool) -> dict[str, Any]:
    """Returns the examples of a rank that brings some: the first has more, unless they are even."""
    number, size = len(batch["ids"]), feeders()[0]
    first = number // size if even else number - 2 * (size - 1)
    rest = number // size if even else 2
    start = 0 if dp_rank == 0 else first + rest * (dp_rank - 1)
    return {
        key: each[start : start + (first if dp_rank == 0 else rest)] for key, each in batch.items()
    }


def lm_loss(model: Any, ids: Any, hidden: Any, states: Any, kinds: Any) -> torch.Tensor:
    loss, _ = model((ids, hidden, None, None, ids))
    return loss


def kinds_loss(model: Any, ids: Any, hidden: Any, states: Any, kinds: Any) -> torch.Tensor:
    loss, _ = model((ids, hidden, kinds, None, ids))
    return loss


def cross_loss(model: Any, ids: Any, hidden: Any, states: Any, kinds: Any) -> torch.Tensor:
    loss, _ = model((ids, None, None, None, states, hidden, ids))
    return loss


def states_loss(model: Any, ids: Any, hidden: Any, states: Any, kinds: Any) -> torch.Tensor:
    result: torch.Tensor = model(states)
    return result.float().square().mean() + result.mean() / 3


def tokens_loss(model: Any, ids: Any, hidden: Any, states: Any, kinds: Any) -> torch.Tensor:
    result: torch.Tensor = model(ids)
    return result.square().sum(-1).mean() * 10


class Mixed(nn.Module):
    """Linears with and without bias, on vectors and sequences, beside a whole norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 20)
        self.norm = nn.LayerNorm(20)
        self.odd = nn.Linear(20, 7)
        self.last = nn.Linear(7, 5, bias=False)  # 7 inputs: stays whole

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.odd(self.norm(self.first(states)))))


class Split(smp.nn.DistributedModule):
    """A user's own: the inner channels are split by hand."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = smp.nn.DistributedLinear(width, inner)
        self.scale = self.add_slice("scale", (inner, 4), 1, nn.init.normal_)
        self.down = smp.nn.DistributedLinear(inner, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(states).relu())


Loss = Callable[..., torch.Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "gpt2": (lambda: language_model(**CAUSAL, activation="gelu_new"), lm_loss),
    "bert": (lambda: language_model(num_token_types=2), kinds_loss),
    "both_norms": (lambda: language_model(pre_layernorm=True, activation="relu"), lm_loss),
    "cross": (lambda: language_model(**CAUSAL, add_cross_attention=True), cross_loss),
    "gptj": (
        lambda: language_model(
            **CAUSAL,
            parallel_residual="one_norm",
            rotary_dim=4,
            rotary_interleaved=True,
            qkv_bias=False,
            attention_output_bias=False,
            use_position_embedding=False,
            tie_lm_head=False,
            lm_head_bias=True,
        ),
        lm_loss,
    ),
    "gptneox": (
        lambda: language_model(
            **CAUSAL,
            parallel_residual="two_norms",
            rotary_dim=2,
            use_position_embedding=False,
            tie_lm_head=False,
        ),
        lm_loss,
    ),
    "gptneo": (
        lambda: language_model(
            **CAUSAL, scale_attention_scores=False, qkv_bias=False, attention_window=[None, 2]
        ),
        lm_loss,
    ),
    "scaled": (
        lambda: language_model(
            **CAUSAL,
            use_normal_initialization=True,
            scale_attn_by_layer_idx=True,
            attention_in_fp32=True,
            query_key_layer_scaling=True,
            fp32_residual_addition=True,
        ),
        lm_loss,
    ),
    "alibi": (lambda: language_model(**CAUSAL, use_alibi=True), lm_loss),
    "linear": (lambda: smp.nn.DistributedLinear(WIDTH, 9), states_loss),
    "widening": (lambda: WideningLinear(WIDTH, VOCAB), states_loss),
    "widening, no bias": (lambda: WideningLinear(WIDTH, VOCAB, False), states_loss),
    "embedding": (lambda: smp.nn.DistributedEmbedding(VOCAB, 12, padding_idx=3), tokens_loss),
}


def local_part(model: smp.DistributedModel, name: str, whole: torch.Tensor) -> torch.Tensor:
    """Returns what is here of a whole tensor that lies as a parameter does."""
    return local_parts(model, {name: whole})[name]


def local_parts(
    model: smp.DistributedModel, wholes: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns what is here of whole tensors that lie as parameters do."""
    own = {name: piece.part for name, _, piece in model.holder.in_pieces()}
    return {
        name: taken(whole, own[name]) if name in own else whole for name, whole in wholes.items()
    }


def slice_itself(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what a rank has of a tensor, which may be compared with a part of the whole."""
    return tensor.as_subclass(torch.Tensor)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two tensors are equal, wherever each is."""
    return torch.equal(slice_itself(got).to(want.device), slice_itself(want))


def assert_close(got: torch.Tensor, want: torch.Tensor, about: str, **tolerance: float) -> None:
    torch.testing.assert_close(
        slice_itself(got).to(want.device),
        slice_itself(want),
        msg=lambda text: f"{about}: {text}",
        **tolerance,
    )


def assert_near(got: torch.Tensor | None, want: torch.Tensor | None, about: str, of: float) -> None:
    """Relative to the gradient itself; one that is nothing but noise has that of the model's."""
    assert got is not None, about
    assert want is not None, about
    difference = (slice_itself(got).to(want.device) - want).norm().item()
    noise = torch.finfo(torch.float32).eps * of
    assert difference <= max(TOLERANCE * want.norm().item(), noise), (about, difference, of)


def compare_gradients(model: smp.DistributedModel, reference: nn.Module) -> None:
    gradients = {name: each.grad for name, each in reference.named_parameters()}
    whole = {name: each for name, each in gradients.items() if each is not None}
    of = max(each.norm().item() for each in whole.values())
    expected = local_parts(model, whole)
    for name, parameter in model.local_named_parameters():
        found = gradient_here(parameter)
        if gradients[name] is None:
            assert found is None or not slice_itself(found).any(), name
        else:
            assert_near(found, expected[name], name, of)


def drop_noise(*modules: nn.Module) -> None:
    """Sets gradients to zero that are none: optimizers that adapt would follow their rounding."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad *= parameter.grad.abs() > 1e-6


def step_of(loss: Loss) -> Any:
    @smp.step
    def train(model: Any, ids: Any, hidden: Any, states: Any, kinds: Any) -> torch.Tensor:
        found = loss(model, ids, hidden, states, kinds)
        model.backward(found)
        return found

    return train


def run_reference(reference: nn.Module, loss: Loss, batch: Any, *, even: bool) -> list[list[float]]:
    """Runs the examples of all ranks on this one; returns losses by rank and microbatch."""
    losses = []
    for dp_rank in range(feeders()[0]):
        share = share_of(dp_rank, batch, even=even)
        parts = [each.chunk(MICROBATCHES) for each in share.values()]
        number = len(share["ids"])
        losses.append([])
        for microbatch in zip(*parts, strict=True):
            found = loss(reference, *microbatch)
            (found * len(microbatch[0]) / number / feeders()[0]).backward()
            losses[-1].append(found.item())
    return losses


def equality_case(name: str, *, even: bool = False) -> None:
    """Initial values, losses, all gradients, and weights after updates are those of one process."""
    build, loss = MODELS[name]
    even = even or smp.state.cfg.prescaled_batch
    torch.manual_seed(100 + smp.tp_rank())  # what the first rank draws counts
    model = smp.DistributedModel(build())
    torch.manual_seed(100)
    with alone():
        reference = build()
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    train = step_of(loss)
    for round_ in range(2):
        with alone():
            batch = data()
            expected = run_reference(reference, loss, batch, even=even)
        dp_rank = feeders()[1]
        share = share_of(dp_rank, batch, even=even)
        found = train(model, *share.values())
        if not round_:
            state = model.state_dict()
            assert state.keys() == reference.state_dict().keys()
            for key, value in reference.state_dict().items():
                assert same(state[key], value), key
        for got, want in zip(found.outputs, expected[dp_rank], strict=True):
            assert abs(got.item() - want) <= 2e-6 * abs(want) * (1 + 10 * round_), (got, want)
        if round_:
            continue  # updates of an adaptive optimizer amplify noise where gradients are none
        compare_gradients(model, reference)
        drop_noise(model, reference)
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()


EQUALITY = {name: (lambda name=name: equality_case(name)) for name in MODELS}


def replaced_linears() -> None:
    """Marked linears are replaced with their values; what does not divide stays."""
    torch.manual_seed(7 + smp.tp_rank())
    with smp.tensor_parallelism(no_such_keyword=1):
        module = Mixed()
    model = smp.DistributedModel(module)
    torch.manual_seed(7)
    reference = Mixed()
    kinds = [type(each).__name__ for each in model.get_module().children()]
    assert kinds == ["DistributedLinear", "LayerNorm", "DistributedLinear", "Linear"]
    assert slice_itself(module.first.weight).shape == (20, WIDTH // smp.tp_size())
    batch = data()
    run_reference(reference, states_loss, batch, even=True)
    step_of(states_loss)(model, *share_of(feeders()[1], batch, even=True).values())
    state = model.state_dict()
    for key, value in reference.state_dict().items():
        assert same(state[key], value), key
    compare_gradients(model, reference)
    queries = {
        name: (model.is_distributed_parameter(each), model.is_scaled_batch_parameter(each))
        for name, each in module.named_parameters()
    }
    assert queries["first.weight"] == (True, True)
    assert queries["first.bias"] == queries["last.weight"] == (False, False)
    reduced = [dict(model.default_reducer_named_parameters())]
    reduced.append(dict(model.scaled_batch_reducer_named_parameters()))
    assert set(reduced[1]) == {"first.weight", "odd.weight"}  # one partition holds all
    assert set(reduced[0]) | set(reduced[1]) == set(queries)
    assert len(list(model.distributed_modules())) == 2


def other_lengths() -> None:
    """Linear maps take examples of other lengths, and of other dims, from each rank."""
    given = [torch.randn(shape, generator=generator(3)) for shape in LENGTHS]
    kinds = set()
    for outputs in (WIDTH // 2, 2 * WIDTH):
        torch.manual_seed(7)
        with smp.tensor_parallelism(auto=True, sample_inputs=(given[0],)):
            module = nn.Sequential(nn.Linear(WIDTH, outputs))
        reference = copy.deepcopy(module)
        model = smp.DistributedModel(module)
        kinds.add(type(module[0]).__name__)
        found = model(given[smp.tp_rank()])
        expected = [reference(each) for each in given]
        assert_close(found, expected[smp.tp_rank()], "a result")
        found.square().sum().backward()
        sum(each.square().sum() for each in expected).div(len(given)).backward()
        compare_gradients(model, reference)
    assert kinds == {"DistributedLinear", "WideningLinear"}


def marks() -> None:
    """The innermost context counts; a module can be marked and cleared when it is finished."""
    with smp.tensor_parallelism():
        one = nn.Linear(4, 4)
        with smp.tensor_parallelism(enabled=False):
            other = nn.Linear(4, 4)
        shared = nn.Linear(4, 4)
    outside = nn.Linear(4, 4)
    outside.weight = shared.weight
    later = nn.Linear(4, 4)
    cleared = nn.Sequential(nn.Linear(4, 4))
    smp.set_tensor_parallelism(later)
    smp.set_tensor_parallelism(cleared)
    smp.set_tensor_parallelism(cleared, enabled=False)
    model = smp.DistributedModel(nn.ModuleList([one, other, shared, outside, later, cleared]))
    kinds = [type(each).__name__ for each in model.get_module()]
    assert kinds == [
        *("DistributedLinear", "Linear", "Linear", "Linear", "DistributedLinear", "Sequential")
    ]
    assert type(model.get_module()[5][0]) is nn.Linear
    with pytest.raises(RuntimeError, match="before DistributedModel"):
        smp.set_tensor_parallelism(model.get_module()[1])


class Original(nn.Module):
    def __init__(self, width: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, states: torch.Tensor, *, doubled: bool = False) -> dict[str, torch.Tensor]:
        return {"out": F.linear(states, self.weight) * (2 if doubled else 1)}


class ByHand(smp.nn.DistributedModule):
    """What a user writes: one split parameter, on the examples of all ranks."""

    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.gain = gain
        self.inner = smp.nn.DistributedLinear(width, width, bias=False)

    def forward(self, states: torch.Tensor, factor: float) -> torch.Tensor:
        return self.inner(states) * factor * self.gain


def registered() -> None:
    """A user's class is replaced by the user's own; hooks translate."""

    def init_hook(width: int, bias: bool = True) -> Any:
        return [width], {"gain": 0.5}

    def forward_hook(states: torch.Tensor, *, doubled: bool = False) -> Any:
        return (states, 2.0 if doubled else 1.0), {}

    smp.tp_register(
        ByHand, init_hook=init_hook, forward_hook=forward_hook, return_hook=lambda out: {"out": out}
    )(Original)
    torch.manual_seed(3)
    with smp.tensor_parallelism(gain=1.0):
        module = Original(8)
    model = smp.DistributedModel(module)
    found = model.get_module()
    assert type(found) is ByHand
    assert found.gain == 1.0  # the context wins over the hook
    whole = model.state_dict()["inner.weight"]
    states = torch.randn(3, 8)
    result = model(states, doubled=True)["out"]
    assert_close(result, 2 * F.linear(states, whole.to(states.device)), "out", rtol=0, atol=1e-5)
    with pytest.raises(TypeError, match=r"signature of the original.*received"):
        smp.tp_register_with_module(Original, ByHand, init_hook=lambda size: ((), {}))
    with pytest.raises(TypeError, match=r"subclass of smp\.nn\.DistributedModule"):
        smp.tp_register_with_module(Original, nn.Linear)


def clipping() -> None:
    """The norm is that of the whole model, each number counted once."""
    build, loss = MODELS["gpt2"]
    torch.manual_seed(5)
    model = smp.DistributedModel(build())
    torch.manual_seed(5)
    with alone():
        reference = build()
        batch = data()
        run_reference(reference, loss, batch, even=True)
    step_of(loss)(model, *share_of(feeders()[1], batch, even=True).values())
    own = [each for each in model.parameters() if each.grad is not None]
    gradients = [each.grad.clone() for each in own]
    wanted = [each.grad for each in reference.parameters() if each.grad is not None]
    for order in (2.0, 1.0, float("inf"), 0.0):
        got = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, order)
        norms = torch.stack([torch.linalg.vector_norm(each, order) for each in wanted])
        want = torch.linalg.vector_norm(norms, order)
        assert abs(got.item() - want.item()) <= 2e-5 * want.item(), (order, got, want)
        for each, gradient in zip(own, gradients, strict=True):
            each.grad = gradient.clone()


def norms_of_tensors() -> None:
    """Optimizers that take norms of whole tensors take those of the whole ones, not of slices."""
    build, loss = MODELS["gpt2"]
    for make in (
        lambda given: smp.optimizers.FusedLamb(
            given, lr=0.1, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5
        ),
        lambda given: smp.optimizers.FusedNovoGrad(given, lr=0.01, weight_decay=0.1),
        lambda given: smp.optimizers.FusedNovoGrad(given, lr=0.01, norm_type=0),
    ):
        torch.manual_seed(5)
        model = smp.DistributedModel(build())
        torch.manual_seed(5)
        with alone():
            reference = build()
        former = {key: each.clone() for key, each in reference.state_dict().items()}
        optimizer = smp.DistributedOptimizer(make(model.parameters()))
        plain = make(reference.parameters())
        train = step_of(loss)
        for _ in range(2):
            with alone():
                batch = data()
                reference.zero_grad()
                run_reference(reference, loss, batch, even=True)
            model.zero_grad()
            train(model, *share_of(feeders()[1], batch, even=True).values())
            drop_noise(model, reference)
            optimizer.step()
            plain.step()
        state = model.state_dict()
        for key, value in reference.state_dict().items():
            moved = (value - former[key]).norm().item()
            difference = (state[key].to(value.device) - value).norm().item()
            assert difference <= 1e-3 * moved, (key, difference, moved)


def errors() -> None:
    """Bad input is named, on every rank, and nothing hangs."""
    size = smp.tp_size()
    with pytest.raises(ValueError, match=rf"\({size}\) must divide .* \(7\)"):
        smp.nn.DistributedLinear(7, 4)
    with pytest.raises(ValueError, match="num_attention_heads"):
        smp.nn.DistributedAttentionLayer(num_attention_heads=3)
    with pytest.raises(ValueError, match="at least one of pre_layernorm and post_layernorm"):
        smp.nn.DistributedTransformerOutputLayer(post_layernorm=False)
    with pytest.raises(ValueError, match="activation must be one of"):
        smp.nn.DistributedTransformerOutputLayer(activation="tanh")
    layer = smp.nn.DistributedTransformerLayer(**SIZES)
    states = torch.zeros(1, 3, WIDTH)
    with pytest.raises(ValueError, match=r"takes \(hidden_states, attention_mask\)"):
        layer((states,))
    linear = smp.nn.DistributedLinear(4, 4)
    with pytest.raises(SMPError, match="must call the same distributed modules"):
        linear(torch.zeros(2, 4, dtype=(torch.float32, torch.float64)[smp.tp_rank()]))
    experts = nn.ModuleList(smp.nn.DistributedLinear(4, 4) for _ in range(2))
    smp.DistributedModel(experts)
    with pytest.raises(SMPError, match=r"tp_rank 0: 0 \(DistributedLinear\).*tp_rank 1: 1"):
        experts[smp.tp_rank()](torch.zeros(2, 4))
    model = smp.DistributedModel(language_model(**CAUSAL))
    with pytest.raises(Exception, match="register_comm_hook"):
        model.register_comm_hook(None, lambda state, bucket: None)
    with smp.tensor_parallelism():
        linear = nn.Linear(4, 4)
    too_early = torch.optim.SGD(linear.parameters(), lr=0.1)
    wrapped = smp.DistributedOptimizer(torch.optim.SGD(linear.parameters(), lr=0.1))
    smp.DistributedModel(linear)
    replaced = r"holds 2 parameters that tensor parallelism has replaced \(weight the first\)"
    with pytest.raises(SMPError, match=replaced):
        smp.DistributedOptimizer(too_early)
    with pytest.raises(SMPError, match=replaced):
        wrapped.step()


def checkpointed() -> None:
    """Layers that are computed again exchange again, and draw what they drew."""
    losses, gradients = [], []
    for again in (None, {"pack_args_as_tuple": True}, {}):
        torch.manual_seed(9)
        options = {**CAUSAL, "attention_dropout_prob": 0.3, "hidden_dropout_prob": 0.2}
        model = smp.DistributedModel(language_model(**options))
        if again is not None:
            layers = model.get_module().transformer.seq_layers
            smp.set_activation_checkpointing(layers, **again)
        batch = data()
        share = share_of(feeders()[1], batch, even=False)
        losses.append([each.item() for each in step_of(lm_loss)(model, *share.values()).outputs])
        gradients.append({key: each.grad for key, each in model.local_named_parameters()})
        del model  # the next has its place in the keys of random numbers
    assert losses[0] == losses[1] == losses[2]
    for name, gradient in gradients[0].items():
        assert_close(gradients[1][name], gradient, name)
        assert_close(gradients[2][name], gradient, name)


def delayed() -> None:
    """Delayed values are those of the first rank, whatever the others would draw."""
    for build, marked in ((lambda: language_model(**CAUSAL), False), (Mixed, True)):
        torch.manual_seed(20 + smp.tp_rank())
        with smp.model_creation(tensor_parallelism=marked), smp.delay_param_initialization():
            module = build()
        model = smp.DistributedModel(module)
        torch.manual_seed(20)
        with alone():
            reference = build()
        loss = states_loss if marked else lm_loss
        batch = data()
        step_of(loss)(model, *share_of(feeders()[1], batch, even=False).values())
        state = model.state_dict()
        for key, value in reference.state_dict().items():
            assert same(state[key], value), key
        with alone():
            run_reference(reference, loss, batch, even=False)
        compare_gradients(model, reference)


def whole_states() -> None:
    """A whole state comes from anywhere and goes anywhere, that of the optimizer too."""
    torch.manual_seed(1)
    with alone():
        reference = language_model(**CAUSAL)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1)
    batch = data()
    with alone():
        run_reference(reference, lm_loss, batch, even=True)
    plain.step()
    model = smp.DistributedModel(language_model(**CAUSAL))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    model.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    step_of(lm_loss)(model, *share_of(feeders()[1], batch, even=True).values())
    got, want = optimizer.state_dict(), plain.state_dict()
    for number, values in want["state"].items():
        for key, value in values.items():
            assert_close(got["state"][number][key], value, key)
    state = model.state_dict()
    for key, value in reference.state_dict().items():
        assert same(state[key], value), key
    part = model.local_state_dict()
    assert part.pop("_smp_is_partial")
    other = smp.DistributedModel(language_model(**CAUSAL))
    other.load_state_dict({**part, "_smp_is_partial": True})
    step_of(lm_loss)(other, *share_of(feeders()[1], batch, even=True).values())
    for key, value in other.state_dict().items():
        assert same(state[key], value), key
    with pytest.raises(RuntimeError, match="its whole shape is"):
        model.load_state_dict({**state, "word_embedding.weight": torch.zeros(2, 2)})


def saved_losses(path: str, *, resume: bool) -> list[float]:
    """Trains two steps with a checkpoint between them, or only the second after resuming."""

    def make() -> nn.Module:
        torch.manual_seed(4)
        return language_model(**CAUSAL)

    return losses_around_checkpoint(make, lm_loss, path, resume=resume)


def losses_around_checkpoint(
    make: Callable[[], nn.Module], loss: Loss, path: str, *, resume: bool
) -> list[float]:
    model = smp.DistributedModel(make())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    train = step_of(loss)
    share = share_of(feeders()[1], data(), even=True)
    if resume:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert smp.resume_from_checkpoint(path, partial=True) == {"step": 1}
    else:
        train(model, *share.values())
        optimizer.step()
        optimizer.zero_grad()
        smp.save_checkpoint(
            path, tag="one", model=model, optimizer=optimizer, user_content={"step": 1}
        )
    losses = []
    for _ in range(2):  # the second shows the state of the optimizer
        found = train(model, *share.values()).reduce_mean().item()
        losses.append(sum(smp.allgather(found, smp.WORLD)) / smp.size())
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Deciding(nn.Module):
    """Asks about its data, and answers may differ between tensor-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.one = smp.nn.DistributedLinear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if bool((states.sum() > 0).item()):
            states = self.one(states)
        return self.other(states)


def different_ways() -> None:
    """Python that decides by data must decide alike on the ranks of a tensor-parallel group."""
    model = smp.DistributedModel(Deciding())

    @smp.step
    def train(model: Any, states: torch.Tensor) -> torch.Tensor:
        loss = model(states).square().mean()
        model.backward(loss)
        return loss

    states = torch.ones(4, 3, WIDTH)
    train(model, states)
    with pytest.raises(SMPError, match="same modules in the same order; the first difference"):
        train(model, states * (1 - 2 * smp.tp_rank()))


class Heads(nn.Module):
    """Has two results, of which a loss may take either."""

    def __init__(self) -> None:
        super().__init__()
        self.left = smp.nn.DistributedLinear(WIDTH, WIDTH)
        self.right = smp.nn.DistributedLinear(WIDTH, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.body(states)
        return self.left(states), self.right(states)


class HeadsInOne(nn.Module):
    """Has them in a module that is lighter than the rest, and so on one partition as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.heads = Heads()

    def forward(self, states: torch.Tensor) -> Any:
        return self.heads(self.body(states))


def different_gradients() -> None:
    """What is differentiated must be alike too: exchanges of two heads would be mixed."""

    @smp.step
    def train(model: Any, states: torch.Tensor, place: int) -> torch.Tensor:
        loss = model(states)[place].square().mean()
        model.backward(loss)
        return loss

    for net, both in (
        (Heads(), r"left \S+ \(with gradients\).* right \S+ \(with gradients\)"),
        (HeadsInOne(), r"gradients of results 0\).* \(with gradients of results 1\)"),
    ):
        model = smp.DistributedModel(net)
        train(model, torch.ones(4, 3, WIDTH), 0)
        with pytest.raises(SMPError, match=both):
            train(model, torch.ones(4, 3, WIDTH), smp.tp_rank())


def whole_updates() -> None:
    """An optimizer that looks at whole parameters has them, of other partitions as well."""
    torch.manual_seed(3)
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    module = copy.deepcopy(plain)
    smp.set_tensor_parallelism(module, True)
    model = smp.DistributedModel(module)
    make = functools.partial(torch.optim.Adafactor, lr=0.05)
    optimizer, other = smp.DistributedOptimizer(make(model.parameters())), make(plain.parameters())

    @smp.step
    def train(model: Any, states: torch.Tensor) -> torch.Tensor:
        loss = model(states).square().mean()
        model.backward(loss)
        return loss

    def go_on() -> None:
        for _ in range(2):
            states = torch.randn(4, WIDTH)  # the same on all ranks
            optimizer.zero_grad(), other.zero_grad()
            train(model, states)
            plain(states).square().mean().backward()
            optimizer.step(), other.step()
        state = model.state_dict()
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(state[key], value)

    go_on()
    kept, given = copy.deepcopy((optimizer.state_dict(), other.state_dict()))
    torch.testing.assert_close(kept["state"], given["state"])
    go_on()
    # In the order of one process, from what one process has kept, and the other way round.
    optimizer.load_state_dict(given), other.load_state_dict(kept)
    go_on()
    first, *_, last = model.parameters()
    optimizer.state[first]["of both"] = first.detach().sum() + last.detach().sum()
    with pytest.raises(UnsupportedError, match="cannot be read with 2 partitions"):
        optimizer.state_dict()


#: Of what each rank gives a linear map.
LENGTHS = (2, 5, WIDTH), (1, 3, 2, WIDTH)
BEHAVIOUR = {
    "replaced_linears": replaced_linears,
    "other_lengths": other_lengths,
    "marks": marks,
    "registered": registered,
    "clipping": clipping,
    "norms_of_tensors": norms_of_tensors,
    "errors": errors,
    "checkpointed": checkpointed,
    "delayed": delayed,
    "whole_states": whole_states,
}
#: What concerns pipelines too.
PIPELINED = {
    name: BEHAVIOUR[name] for name in ("clipping", "checkpointed", "delayed", "whole_states")
} | {
    "different_ways": different_ways,
    "different_gradients": different_gradients,
    "whole_updates": whole_updates,
}
#: What is tried in a pipeline at each change; the rest has a test without one.
QUICK = ("clipping", "different_ways", "different_gradients", "whole_updates")


def dropout_losses() -> list[float]:
    """Returns the losses of all microbatches of a model that drops, as one process has them."""
    torch.manual_seed(100)
    options = {**CAUSAL, "attention_dropout_prob": 0.3, "hidden_dropout_prob": 0.2}
    model = smp.DistributedModel(language_model(**options))
    train = step_of(lm_loss)
    losses: list[float] = []
    for _ in range(2):
        batch = data()
        lanes = (MICROBATCHES, smp.tp_size(), -1) if smp.tp_size() > 1 else (1, 1, -1)
        parts = [
            each.unflatten(0, lanes)[:, smp.tp_rank()].flatten(0, 1) for each in batch.values()
        ]
        own = [each.item() for each in train(model, *parts).outputs]
        everyones = smp.allgather(own, smp.TP_GROUP)
        losses += [loss for together in zip(*everyones, strict=True) for loss in together]
        model.zero_grad()
    return losses


def joined() -> None:
    """Replicas with fewer batches take part with zeros; slices are reduced among their copies."""
    torch.manual_seed(5)
    model = smp.DistributedModel(language_model(**CAUSAL))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = step_of(lm_loss)
    batch = data()
    share = share_of(smp.dp_rank(), batch, even=True)
    with model.join():
        for _ in range(1 + smp.rdp_rank()):
            optimizer.zero_grad()
            train(model, *share.values())
            optimizer.step()
    torch.manual_seed(5)
    with alone():
        reference = language_model(**CAUSAL)
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        for round_ in range(2):
            plain.zero_grad()
            for dp_rank, rdp_rank in enumerate(smp.allgather(smp.rdp_rank(), smp.DP_GROUP)):
                if round_ > rdp_rank:
                    continue
                parts = [
                    each.chunk(MICROBATCHES)
                    for each in share_of(dp_rank, batch, even=True).values()
                ]
                for microbatch in zip(*parts, strict=True):
                    (lm_loss(reference, *microbatch) / MICROBATCHES / smp.dp_size()).backward()
            plain.step()
    state = model.state_dict()
    for key, value in reference.state_dict().items():
        assert_close(state[key], value, key, rtol=1e-4, atol=1e-6)
