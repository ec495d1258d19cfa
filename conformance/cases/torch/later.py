"""PyTorch: rows whose feature is not there yet, each with the call that asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.registry import Body, Case, add, later
from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.common.testing import run_ranks

Probe = Callable[[Any], object]


def _started(**parameters: Any) -> Probe:
    def probe(adapter: Any) -> object:
        return adapter.smp.init({"pipeline_parallel_degree": 1, **parameters})

    return probe


def _made(path: str, *args: Any) -> Probe:
    """Calls what a name stands for."""

    def probe(adapter: Any) -> object:
        import importlib

        adapter.smp.init({"pipeline_parallel_degree": 1})
        module, _, name = f"{adapter.smp.__name__}.{path}".rpartition(".")
        return getattr(importlib.import_module(module), name)(*args)

    return probe


def _of_model(name: str) -> Probe:
    def probe(adapter: Any) -> object:
        adapter.smp.init({"pipeline_parallel_degree": 1})
        model = adapter.model()
        return list(getattr(model, name)(*list(model.parameters())[:1]))

    return probe


def _clipped(adapter: Any) -> object:
    import torch

    adapter.smp.init({"pipeline_parallel_degree": 1})
    optimizer = torch.optim.SGD(adapter.net().parameters(), lr=0.1)
    return adapter.smp.DistributedOptimizer(optimizer).clip_master_grads(1.0)


def make_split_layers() -> str:
    """Asks for tensor parallelism, on two ranks; returns what was said against it."""
    from torch import nn

    import smdistributed.modelparallel.torch as smp

    smp.init({"pipeline_parallel_degree": 1, "tensor_parallel_degree": 2, "ddp": True})
    try:
        with smp.tensor_parallelism(enabled=True):
            layer = nn.Linear(4, 4)
        smp.set_tensor_parallelism(layer, True)
        smp.DistributedModel(layer)
    except UnsupportedError as error:
        return str(error)
    return ""


def _two_copies(body: Callable[[], str]) -> str:
    """Returns what a body says in the first of two copies of one process, which imports once."""
    preload = ("smdistributed.modelparallel.torch",)
    said: str = run_ranks(2, body, launcher="fork", timeout=60, preload=preload).results[0]
    return said


def _split_layers(adapter: Any) -> None:
    if said := _two_copies(make_split_layers):
        raise UnsupportedError(said)


_HF = "nn.huggingface"

_PROBES: dict[str, Probe] = {
    "config.fp16": _started(fp16=True),
    "config.fp16_params": _started(fp16_params=True),
    "config.bf16": _started(bf16=True),
    "config.shard_optimizer_state": _started(ddp=True, shard_optimizer_state=True),
    "config.offload_activations": _started(offload_activations=True),
    "config.C09": _started(offload_activations=True),
    "torch.state_sharding": _started(ddp=True, shard_optimizer_state=True),
    "FP16_Module": _started(fp16=True),
    "FP16_Optimizer": _started(fp16=True),
    "compat.clip_master_grads_and_overflow": _started(fp16=True),
    "smp.DistributedOptimizer.clip_master_grads": _clipped,
    "smp.nn.FlashAttentionLayer": _made("nn.FlashAttentionLayer"),
    "smp.nn.FlashAttentionLayer.forward": _made("nn.FlashAttentionLayer"),
    "smp.tp_register": _made("tp_register", type),
    "smp.tp_register_with_module": _made("tp_register_with_module", type, type),
    "smp.nn.DistributedModule": _made("nn.DistributedModule"),
    "smp.nn.DistributedLinear": _made("nn.DistributedLinear", 4, 4),
    "smp.nn.DistributedEmbedding": _made("nn.DistributedEmbedding", 4, 4),
    "smp.nn.DistributedAttentionLayer": _made("nn.DistributedAttentionLayer"),
    "smp.nn.DistributedTransformerOutputLayer": _made("nn.DistributedTransformerOutputLayer"),
    "smp.nn.DistributedTransformerLayer": _made("nn.DistributedTransformerLayer"),
    "smp.nn.DistributedTransformer": _made("nn.DistributedTransformer"),
    "smp.nn.DistributedTransformerLMHead": _made("nn.DistributedTransformerLMHead"),
    "torch.in_use.translate_hf_state_dict_to_smdistributed_state_dict_max_seq_len": _made(
        f"{_HF}.gpt2.translate_hf_state_dict_to_smdistributed", {}, 128
    ),
    "torch.in_use.get_full_state_dict_from_sharded_data_parallel_checkpoint": _made(
        "sharded_data_parallel_checkpoint."
        "get_full_state_dict_from_sharded_data_parallel_checkpoint",
        "folder",
    ),
    "compat.translate_function_names": _made(
        f"{_HF}.gpt2.translate_hf_state_dict_to_smdistributed"
    ),
    **{
        f"smp.nn.huggingface.{family}.{name}": _made(f"{_HF}.{family}.{name}", {})
        for family in ("gpt2", "bert", "roberta", "gptj", "gptneo")
        for name in (
            f"translate_state_dict_to_hf_{family}",
            "translate_hf_gptj_state_dict_to_smdistributed_gptj"
            if family == "gptj"
            else f"translate_hf_state_dict_to_smdistributed_{family}",
        )
    },
}


def _asked(probe: Probe) -> Body:
    def body(adapter: Any) -> None:
        probe(adapter)

    return body


def make_shards() -> str:
    """Asks for sharded data parallelism, on two ranks; returns what was said against it."""
    import smdistributed.modelparallel.torch as smp

    try:
        smp.init({"ddp": True, "sharded_data_parallel_degree": 2})
    except UnsupportedError as error:
        return str(error)
    return ""


def _shards(adapter: Any) -> None:
    if said := _two_copies(make_shards):
        raise UnsupportedError(said)


#: They share a job, since it takes two processes.
_OF_TENSOR_PARALLELISM = (
    "smp.tensor_parallelism",
    "smp.set_tensor_parallelism",
    "compat.tensor_parallelism_keywords",
    "compat.tensor_parallel_attributes",
    "tp.hugging_face_models",
    "torch.in_use.transformer_seq_layers_on_a_distributed_GPT_model_transformer_h_when_not_distributed",
)
later(*_OF_TENSOR_PARALLELISM)(_split_layers)
later(
    "torch.sharded_data_parallel",
    "ranks.sharding_groups",
    "compat.sharded_parameter_attributes",
)(_shards)
for _row, _probe in _PROBES.items():
    add(Case(f"later_{_row}", (_row,), ("new",), ("torch",), _asked(_probe), is_built=False))
