"""PyTorch: modules that are split over the tensor-parallel ranks.

Long because each kind of module stands beside its formula, or the plain model that it replaces.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from conformance.adapters import adapter_of
from conformance.adapters.base import WIDTH
from conformance.cases.common.starting import quickly
from conformance.cases.torch.partition import log_of
from conformance.registry import torch_case
from smdistributed.modelparallel.common.testing import run_ranks

BOTH = ("slices", "slices_in_pipelines")
SIZES = {
    "num_attention_heads": 2,
    "attention_head_size": 4,
    "hidden_size": WIDTH,
    "attention_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}
LAYER = {**SIZES, "intermediate_size": 8}
LM = {**LAYER, "num_layers": 2, "vocab_size": 12, "num_positions": 8}
LENGTH = 5

Build = Callable[[Any], Any]


@contextlib.contextmanager
def alone(adapter: Any) -> Iterator[None]:
    """Inside, distributed modules are those of a process without a job."""
    module = adapter.smp.nn.DistributedModule
    kept = module._group
    module._group = type(kept)()
    try:
        yield
    finally:
        module._group = kept


def examples(adapter: Any, rank: int) -> Any:
    """Returns the examples of one rank: ``(4, LENGTH, WIDTH)``."""
    import torch

    draws = torch.Generator().manual_seed(50 + rank)
    return torch.randn(4, LENGTH, WIDTH, generator=draws).to(adapter.device)


def tokens(adapter: Any, rank: int) -> Any:
    """Returns the tokens of one rank: ``(4, LENGTH)``."""
    import torch

    draws = torch.Generator().manual_seed(60 + rank)
    return torch.randint(0, 12, (4, LENGTH), generator=draws).to(adapter.device)


def holds(adapter: Any, build: Build, body: Any, make: Any = examples) -> Any:
    """Trains a step on every rank's own examples, beside one process that has them all.

    Initial values, loss and gradients must be those of the one process.
    """
    import torch

    smp = adapter.smp
    number, own = smp.dp_size(), smp.dp_rank()
    if adapter.config.prescaled_batch:  # the ranks of a group bring the same
        number, own = smp.rdp_size(), smp.rdp_rank()
    torch.manual_seed(10 + smp.tp_rank())  # the values are those that the first rank draws
    model = smp.DistributedModel(build(adapter))
    torch.manual_seed(10)
    with alone(adapter):
        whole = build(adapter).to(adapter.device)
        losses = [body(whole, make(adapter, rank)) for rank in range(number)]
        torch.stack(losses).mean().backward()

    def step(model: Any, given: Any) -> Any:
        loss = body(model, given)
        model.backward(loss)
        return loss

    found = smp.step(step)(model, make(adapter, own)).reduce_mean()
    wanted = losses[own].detach()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    state = model.state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name].to(value.device), value), name
    gradients = {name: each.grad for name, each in whole.named_parameters()}
    for name, parameter in model.local_named_parameters():
        want, axis = gradients[name], smp_axis(adapter, parameter)
        if axis is not None:
            want = want.chunk(smp.tp_size(), axis)[smp.tp_rank()]
        # Of its own slice a rank may say what it is; a comparison would be taken for the whole's.
        found = parameter.grad.as_subclass(torch.Tensor)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)
    return model


def smp_axis(adapter: Any, parameter: Any) -> Any:
    """Returns the dim along which a parameter is split."""
    return importlib.import_module(f"{adapter.smp.__name__}.utils").get_distribution_axis(parameter)


def square(model: Any, given: Any) -> Any:
    """Returns a loss of states."""
    return model(given).square().mean()


def of_tuple(model: Any, given: Any) -> Any:
    """Returns a loss of a layer's tuple."""
    return model((given, None))[0].square().mean()


@torch_case("smp.nn.DistributedLinear", worlds=BOTH)
def a_distributed_linear_is_a_linear(adapter: Any) -> None:
    model = holds(adapter, lambda adapter: adapter.smp.nn.DistributedLinear(WIDTH, 4), square)
    # Between steps a parameter stands for the whole one; its local shape is that of the state.
    local = model.local_state_dict()
    assert "weight" not in local or tuple(local["weight"].shape) == (4, WIDTH // 2)
    with pytest.raises(ValueError, match=r"\(2\) must divide .* \(5\)"):
        adapter.smp.nn.DistributedLinear(5, 4)


@torch_case("smp.nn.DistributedEmbedding", worlds=BOTH)
def a_distributed_embedding_is_an_embedding(adapter: Any) -> None:
    def build(adapter: Any) -> Any:
        return adapter.smp.nn.DistributedEmbedding(12, WIDTH)

    model = holds(adapter, build, square, tokens)
    assert all(map(model.is_distributed_parameter, model.local_parameters()))


@torch_case("smp.nn.DistributedAttentionLayer", worlds=("slices",))
def attention_is_split_by_heads(adapter: Any) -> None:
    def build(adapter: Any) -> Any:
        return adapter.smp.nn.DistributedAttentionLayer(**SIZES, causal_mask_size=8)

    holds(adapter, build, lambda model, given: model((given, None)).square().mean())
    with pytest.raises(ValueError, match="pre_layernorm and post_layernorm"):
        adapter.smp.nn.DistributedAttentionLayer(**SIZES, post_layernorm=False)


def plain_attention(layer: Any, queries: Any, others: Any, hidden: Any) -> Any:
    """Returns what a whole attention layer without norms before it gives, by its formula."""
    from torch.nn import functional as F

    def heads(part: Any, x: Any) -> Any:
        return F.linear(x, part.weight, part.bias).unflatten(-1, (2, 4)).transpose(1, 2)

    scores = heads(layer.query, queries) @ heads(layer.key, others).transpose(-1, -2) / 2
    seen = scores.masked_fill(hidden, -1e4).softmax(-1) @ heads(layer.value, others)
    dense = F.linear(seen.transpose(1, 2).flatten(2), layer.dense.weight, layer.dense.bias)
    norm = layer.layernorm
    return F.layer_norm(queries + dense, (WIDTH,), norm.weight, norm.bias, norm.eps)


@torch_case("smp.nn.DistributedAttentionLayer", worlds=("alone",))
def attention_is_its_formula(adapter: Any) -> None:
    import torch

    here = torch.arange(LENGTH, device=adapter.device)
    later, far = here[:, None] < here, here[:, None] - here >= 2
    kind, x = adapter.smp.nn.DistributedAttentionLayer, examples(adapter, 0)
    pre = {"pre_layernorm": False, "post_layernorm": True}
    for options, hidden in (
        ({}, torch.zeros_like(later)),
        ({"causal_mask_size": 8}, later),
        ({"causal_mask_size": 8, "attention_window": 2}, later | far),
    ):
        layer = kind(**SIZES, **pre, **options).to(adapter.device)
        wanted = plain_attention(layer, x, x, hidden)
        torch.testing.assert_close(layer((x, None)), wanted, rtol=1e-4, atol=1e-5)
    layer = kind(**SIZES, **pre, cross_attention=True).to(adapter.device)
    other = examples(adapter, 1)[:, :3]
    mask = torch.zeros(4, 1, 1, 3, device=adapter.device)
    mask[:, ..., 2] = -1e4
    wanted = plain_attention(layer, x, other, mask.bool())
    torch.testing.assert_close(layer((x, other, mask)), wanted, rtol=1e-4, atol=1e-5)


@torch_case("smp.nn.DistributedTransformerOutputLayer", worlds=("slices",))
def the_output_layer_is_split_by_inner_channels(adapter: Any) -> None:
    def build(adapter: Any) -> Any:
        return adapter.smp.nn.DistributedTransformerOutputLayer(WIDTH, 8, 0.0, "relu")

    holds(adapter, build, square)
    with pytest.raises(ValueError, match="activation must be one of gelu, relu"):
        adapter.smp.nn.DistributedTransformerOutputLayer(WIDTH, 8, 0.0, "no")


@torch_case("smp.nn.DistributedTransformerLayer", "smp.nn.DistributedTransformer", worlds=BOTH)
def transformer_layers_are_split(adapter: Any) -> None:
    def build(adapter: Any) -> Any:
        return adapter.smp.nn.DistributedTransformer(num_layers=2, **LAYER, pre_layernorm=True)

    model = holds(adapter, build, of_tuple)
    assert len(model.get_module().seq_layers) == 2


def language_model(adapter: Any) -> Any:
    """Returns a small one."""
    return adapter.smp.nn.DistributedTransformerLMHead(**LM, causal_mask_size=8)


def language_loss(model: Any, ids: Any) -> Any:
    """Returns its loss."""
    return model((ids, None, None, None, ids))[0]


@torch_case("smp.nn.DistributedTransformerLMHead", "config.tensor_parallel_degree", worlds=BOTH)
def a_language_model_is_split(adapter: Any) -> None:
    holds(adapter, language_model, language_loss, tokens)


@torch_case("config.prescaled_batch", worlds=("same_batch",))
def the_same_batch_of_a_group_counts_once(adapter: Any) -> None:
    holds(adapter, language_model, language_loss, tokens)
    holds(adapter, lambda adapter: adapter.smp.nn.DistributedLinear(WIDTH, 4), square)


@torch_case("smp.nn.FlashAttentionLayer", "smp.nn.FlashAttentionLayer.forward", worlds=("alone",))
def flash_attention_takes_packed_heads(adapter: Any) -> None:
    import torch

    layer = adapter.smp.nn.FlashAttentionLayer(0.0, attention_head_size=4)
    packed = torch.randn(2, 5, 3, 3, 4, device=adapter.device)
    queries, keys, values = (packed[:, :, place].transpose(1, 2) for place in range(3))
    wanted = (queries @ keys.transpose(-1, -2) / 2).softmax(-1) @ values
    torch.testing.assert_close(layer(packed), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="needs attention_head_size"):
        adapter.smp.nn.FlashAttentionLayer()


@torch_case("smp.nn.FusedLayerNorm", worlds=("alone",))
def the_fused_norm_is_a_norm(adapter: Any) -> None:
    import torch

    x = torch.randn(3, WIDTH)
    wanted = torch.nn.functional.layer_norm(x, (WIDTH,))
    torch.testing.assert_close(adapter.smp.nn.FusedLayerNorm(WIDTH)(x), wanted)


@torch_case("smp.tensor_parallelism", "compat.tensor_parallelism_keywords", worlds=BOTH)
def marked_modules_are_replaced_and_keep_their_values(adapter: Any) -> None:
    from torch import nn

    def build(adapter: Any) -> Any:
        with adapter.smp.tensor_parallelism(
            fused_softmax=True, fused_bias_gelu=True, fused_dropout=True, flash_attention=True
        ):
            return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 4))

    model = holds(adapter, build, square)
    kinds = [type(each).__name__ for each in model.get_module()]
    assert kinds == ["DistributedLinear", "Tanh", "DistributedLinear"]


@torch_case("smp.tensor_parallelism", worlds=("slices",))
def keywords_that_no_module_takes_are_told(adapter: Any) -> None:
    from torch import nn

    with adapter.smp.tensor_parallelism(no_such_keyword=3):
        net = nn.Sequential(nn.Linear(4, 4))
    with log_of() as log:
        adapter.smp.DistributedModel(net)
    assert "no_such_keyword" in log.getvalue()


@torch_case("smp.set_tensor_parallelism", "smp.tensor_parallelism", worlds=("slices",))
def the_innermost_word_counts(adapter: Any) -> None:
    from torch import nn

    smp = adapter.smp
    with smp.tensor_parallelism():
        split = nn.Linear(4, 4)
        with smp.tensor_parallelism(enabled=False):
            left = nn.Linear(4, 4)
        odd = nn.Linear(3, 4)
    later, cleared = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
    smp.set_tensor_parallelism(later)
    smp.set_tensor_parallelism(cleared)
    smp.set_tensor_parallelism(cleared, False)
    model = smp.DistributedModel(nn.ModuleList([split, left, odd, later, cleared]))
    kinds = [type(each).__name__ for each in model.get_module()]
    assert kinds == ["DistributedLinear", "Linear", "Linear", "DistributedLinear", "Sequential"]
    assert type(model.get_module()[4][0]) is nn.Linear
    with pytest.raises(RuntimeError, match="before DistributedModel"):
        smp.set_tensor_parallelism(model.get_module()[1])


@torch_case("smp.optimizers.FusedLamb", worlds=("slices",))
def rates_go_by_the_norms_of_whole_tensors(adapter: Any) -> None:
    import torch

    def trained_with(model: Any, optimizer: Any, given: Any, backward: Any) -> None:
        for number in range(3):
            optimizer.zero_grad()
            backward(given + number)
            optimizer.step()

    smp, kind = adapter.smp, adapter.smp.optimizers.FusedLamb
    options = {"lr": 0.1, "weight_decay": 0.1}
    torch.manual_seed(10)
    model = smp.DistributedModel(smp.nn.DistributedLinear(WIDTH, 4))
    torch.manual_seed(10)
    with alone(adapter):
        whole = smp.nn.DistributedLinear(WIDTH, 4).to(adapter.device)
        given = torch.cat([examples(adapter, rank) for rank in range(smp.dp_size())])
        trained_with(
            whole,
            kind(whole.parameters(), **options),
            given,
            lambda x: whole(x).square().mean().backward(),
        )

    @smp.step
    def step(model: Any, given: Any) -> None:
        model.backward(model(given).square().mean())

    own = examples(adapter, smp.dp_rank())
    optimizer = smp.DistributedOptimizer(kind(model.parameters(), **options))
    trained_with(model, optimizer, own, lambda x: step(model, x))
    state = model.state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(state[name].to(value.device), value, rtol=1e-4, atol=1e-5)


@torch_case("config.prescaled_batch", "smp.nn.DistributedLinear", worlds=("slices",))
def ranks_of_a_group_bring_batches_of_any_sizes(adapter: Any) -> None:
    import torch

    smp = adapter.smp
    torch.manual_seed(10)
    model = smp.DistributedModel(smp.nn.DistributedLinear(WIDTH, 4))
    step = smp.step(lambda model, x: model(x))
    for sizes in ((4, 8), (8, 4), (4, 4), (12, 4)):
        x = torch.ones(sizes[smp.tp_rank()], WIDTH, device=adapter.device) * (1 + smp.tp_rank())
        found = step(model, x).concat()
        state = {name: value.to(x.device) for name, value in model.state_dict().items()}
        wanted = torch.nn.functional.linear(x, state["weight"], state["bias"])
        torch.testing.assert_close(found, wanted)


# ---------------------------------------------------------------- models of Transformers


def _gpt2(adapter: Any) -> Any:
    """Returns a GPT-2 of plain torch, with the names that it has in Transformers."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Conv1D(nn.Module):
        def __init__(self, outputs: int, inputs: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(inputs, outputs) / 5)
            self.bias = nn.Parameter(torch.randn(outputs) / 5)

        def forward(self, x: Any) -> Any:
            return x @ self.weight + self.bias

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(8), nn.LayerNorm(8)
            self.attn, self.mlp = nn.Module(), nn.Module()
            self.attn.c_attn, self.attn.c_proj = Conv1D(24, 8), Conv1D(8, 8)
            self.mlp.c_fc, self.mlp.c_proj = Conv1D(32, 8), Conv1D(8, 32)

        def forward(self, x: Any) -> Any:
            packed = self.attn.c_attn(self.ln_1(x)).unflatten(-1, (3, 2, 4))
            queries, keys, values = (each.transpose(1, 2) for each in packed.unbind(-3))
            scores = queries @ keys.transpose(-1, -2) / 2
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            seen = scores.masked_fill(later, -torch.inf).softmax(-1) @ values
            x = x + self.attn.c_proj(seen.transpose(1, 2).flatten(2))
            inner = F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh")
            return x + self.mlp.c_proj(inner)

    class GPT2LMHeadModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = types.SimpleNamespace(
                n_layer=2,
                n_head=2,
                n_embd=8,
                n_inner=None,
                n_positions=8,
                **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
                vocab_size=12,
                activation_function="gelu_new",
                model_type="gpt2",
                layer_norm_epsilon=1e-5,
                initializer_range=0.02,
            )
            self.transformer = nn.Module()
            self.transformer.wte, self.transformer.wpe = nn.Embedding(12, 8), nn.Embedding(8, 8)
            self.transformer.h = nn.ModuleList(Block() for _ in range(2))
            self.transformer.ln_f = nn.LayerNorm(8)
            self.lm_head = nn.Linear(8, 12, bias=False)
            self.lm_head.weight = self.transformer.wte.weight

        def forward(
            self,
            input_ids: Any,
            labels: Any = None,
            return_dict: Any = None,
            inputs_embeds: Any = None,
        ) -> Any:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            x = self.transformer.wte(input_ids) + self.transformer.wpe(positions)
            for block in self.transformer.h:
                x = block(x)
            logits = self.lm_head(self.transformer.ln_f(x))
            targets = labels[:, 1:].flatten()
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets), logits

    GPT2LMHeadModel.__module__ = "transformers.models.gpt2.modeling_gpt2"
    with adapter.smp.tensor_parallelism():
        return GPT2LMHeadModel()


@torch_case(
    "tp.hugging_face_models",
    "compat.tensor_parallel_attributes",
    "torch.in_use.transformer_seq_layers_on_a_distributed_GPT_model_transformer_h_when_not_distributed",
    worlds=BOTH,
)
def models_of_transformers_are_split(adapter: Any) -> None:
    import torch

    smp = adapter.smp
    torch.manual_seed(5)
    whole = _gpt2(adapter).to(adapter.device)
    torch.manual_seed(5 + smp.tp_rank())
    model = smp.DistributedModel(_gpt2(adapter))
    module = model.get_module()
    assert type(module) is smp.nn.DistributedTransformerLMHead
    for layer in module.transformer.seq_layers:
        assert layer.attention is not None
        assert layer.output is not None
    ids = tokens(adapter, smp.dp_rank())

    def step(model: Any, ids: Any) -> Any:
        loss, _ = model(ids, labels=ids, return_dict=False)
        model.backward(loss)
        return loss

    with pytest.raises(Exception, match="inputs_embeds"):
        smp.step(lambda model, ids: model(ids, inputs_embeds=ids))(model, ids)
    found = smp.step(step)(model, ids).reduce_mean()
    torch.testing.assert_close(found, whole(ids, labels=ids)[0].detach(), rtol=1e-4, atol=1e-5)
    ((to_theirs, to_ours),) = smp.state.module_manager.translate_functions[-1:]
    state = model.state_dict()
    theirs = to_theirs(state)
    for name, value in whole.state_dict().items():
        assert torch.equal(theirs[name].to(value.device), value), name
    assert all(torch.equal(to_ours(theirs)[name], value) for name, value in state.items())


_FAMILIES = ("gpt2", "bert", "roberta", "gptj", "gptneo")


def _from_theirs(family: str) -> str:
    middle = "_gptj" if family == "gptj" else ""
    return f"translate_hf{middle}_state_dict_to_smdistributed_{family}"


@torch_case(
    *(
        f"smp.nn.huggingface.{family}.{name}"
        for family in _FAMILIES
        for name in (f"translate_state_dict_to_hf_{family}", _from_theirs(family))
    ),
    "torch.in_use.translate_hf_state_dict_to_smdistributed_state_dict_max_seq_len",
    "compat.translate_function_names",
    worlds=("alone",),
)
def translations_lead_there_and_back(adapter: Any) -> None:
    import torch

    for family in _FAMILIES:
        module = importlib.import_module(f"{adapter.smp.__name__}.nn.huggingface.{family}")
        to_ours = getattr(module, _from_theirs(family))
        to_theirs = getattr(module, f"translate_state_dict_to_hf_{family}")
        begin = "encoder.seq_layers.0" if "bert" in family else "transformer.seq_layers.0"
        ours = {
            f"{begin}.{part}.weight": torch.randn(4, 4)
            for part in ("attention.query", "attention.key", "attention.value", "output.dense1")
        }
        if "bert" not in family:
            ours["word_embedding.weight"] = torch.randn(5, 4)
        theirs = to_theirs(ours)
        assert not ours.keys() & theirs.keys()
        again = to_ours(theirs)
        assert again.keys() == ours.keys()
        assert all(torch.equal(again[name], value) for name, value in ours.items())
        older = module.translate_hf_state_dict_to_smdistributed
        assert older(theirs, 8).keys() == ours.keys()


def dropped_out(degree: int, microbatches: int) -> list[list[Any]]:
    """Returns, for each rank and microbatch, what attention with dropout gives."""
    import torch

    smp = adapter_of("torch").smp
    smp.init({"tensor_parallel_degree": degree, "microbatches": microbatches, "ddp": True})
    torch.manual_seed(11)
    dropout = {"attention_dropout_prob": 0.5, "hidden_dropout_prob": 0.3}
    layer = smp.nn.DistributedAttentionLayer(**{**SIZES, **dropout})
    model = smp.DistributedModel(layer)
    torch.manual_seed(12)  # one draw a step
    size = 2 * microbatches
    given = torch.ones(size, LENGTH, WIDTH), torch.zeros(size, 1, 1, LENGTH)
    found = smp.step(lambda model, *given: model(given))(model, *given)
    everyone: list[list[Any]] = smp.allgather(
        [each.tolist() for each in found.outputs], smp.DP_GROUP
    )
    return everyone


@torch_case(
    "torch.script_rules", "smp.nn.DistributedAttentionLayer", worlds=("new",), starts_jobs=True
)
def tensor_ranks_drop_out_what_one_process_does_in_turn(adapter: Any) -> None:
    """Of two ranks, rank 1 has in microbatch 2 what one process has in microbatch 5."""
    import torch

    one, two = (
        torch.tensor(run_ranks(degree, dropped_out, args=args, **quickly(adapter)).results[0])
        for degree, args in ((1, [1, 8]), (2, [2, 4]))
    )
    torch.testing.assert_close(two.transpose(0, 1).flatten(0, 1), one[0])
    assert len({tuple(each.flatten().tolist()) for each in one[0]}) == len(one[0])
