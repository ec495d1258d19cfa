"""The names that published scripts lean on, one test a name; here in one process."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smdistributed.modelparallel as package
import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.config import load
from smdistributed.modelparallel.common.errors import (
    CheckpointError,
    ConfigError,
    UnsupportedError,
)
from smdistributed.modelparallel.torch.api.slot import slot

ROOT = "smdistributed.modelparallel"
TRANSLATED = ("bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta")


@pytest.fixture(scope="module", autouse=True)
def _job() -> Iterator[None]:
    smp.init({"microbatches": 2, "ddp": True})
    yield
    slot.get().close()
    slot.clear()


@smp.step()
def train(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


@smp.step()
def evaluate(model: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = model(x)
    return result


def wrapped() -> smp.DistributedModel:
    return smp.DistributedModel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))


# ---------------------------------------------------------------- the model


def test_chains_of_module_end_at_the_users_model() -> None:
    model = wrapped()
    user = model.get_module()
    assert model.module is not user
    assert model.module.module is user
    assert not hasattr(user, "module")
    unwrapped: Any = model
    while hasattr(unwrapped, "module"):  # as Transformers 4.24 unwraps models
        unwrapped = unwrapped.module
    assert unwrapped is user


def test_module_of_the_user_is_left_alone() -> None:
    user = nn.Module()
    user.module = nn.Linear(2, 2)
    assert smp.DistributedModel(user).module.module.module is user.module


def test_chains_leave_no_trace_in_names() -> None:
    model = wrapped()
    plain = dict(model.get_module().named_parameters())
    assert [name for name, _ in model.module.named_parameters()] == [f"module.{n}" for n in plain]
    assert list(model.state_dict()) == list(model.get_module().state_dict())
    assert len(list(model.get_module().modules())) == 3


class Scaled(nn.Sequential):
    """Has a parameter and buffers in itself, not in its children alone."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + self.shift + self.passing


def walked(module: nn.Module) -> list[str]:
    """Names of parameters as code finds them that goes from child to child."""
    inner = [f"{name}.{each}" for name, child in module.named_children() for each in walked(child)]
    return inner + list(module._parameters)


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: [name for name, _ in model.named_parameters()],
        lambda model: [name for name, _ in model.named_parameters("net", recurse=False)],
        lambda model: [name for name, _ in model.named_buffers()],
        lambda model: [name for name, _ in model.named_buffers(recurse=False)],
        lambda model: [name for name, _ in model.named_modules(prefix="net")],
        lambda model: [name for name, _ in model.named_children()],
        lambda model: list(model.state_dict()),
        lambda model: [type(each) for each in model.modules()],
        lambda model: list(map(id, model.parameters())),
        lambda model: id(model.get_parameter("0.weight")),
        lambda model: id(model.get_buffer("1.running_mean")),
        lambda model: id(model.get_submodule("1")),
        lambda model: list(nn.ModuleDict({"net": model}).state_dict()),
        lambda model: [name for name, _ in nn.ModuleDict({"net": model}).named_parameters()],
        walked,
    ],
)
def test_a_model_is_walked_through_by_the_names_of_the_plain_one(
    ask: Callable[[nn.Module], object],
) -> None:
    model = smp.DistributedModel(Scaled())
    assert ask(model) == ask(model.get_module())


def test_what_the_wrapper_is_given_the_model_has() -> None:
    model = smp.DistributedModel(Scaled())
    user = model.get_module()
    model.scale = nn.Parameter(torch.full_like(user.scale, 2.0))
    model.register_buffer("extra", torch.zeros(1))
    model.register_buffer("left_out", torch.zeros(1), persistent=False)
    assert user.scale is model.scale
    assert "extra" in model.state_dict()
    assert "left_out" in dict(user.named_buffers())
    assert "left_out" not in model.state_dict()
    train(model, torch.randn(4, 2))
    assert user.scale.grad is not None


def test_methods_of_modules_reach_the_model_itself() -> None:
    model = smp.DistributedModel(Scaled())
    user = model.get_module()
    seen: list[nn.Module] = []
    assert model.apply(seen.append) is model
    assert seen == [*user.children(), user]
    assert model.eval() is model
    assert not any(each.training for each in (model, model.module, *user.modules()))
    assert model.double() is model
    assert {each.dtype for each in model.parameters()} == {torch.float64}
    assert user.scale.dtype is user.shift.dtype is torch.float64


@pytest.mark.parametrize(
    "make",
    [
        lambda: smp.amp.GradScaler(1024.0, growth_interval=3),
        lambda: smp.amp.GradScaler(init_scale=1024.0, growth_interval=3),
        lambda: smp.amp.GradScaler("cuda", 1024.0, growth_interval=3),
        lambda: smp.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3),
        lambda: smp.amp.GradScaler(torch.device("cpu"), 1024.0, 2.0, 0.5, 3),
        lambda: smp.amp.GradScaler(device="cuda", init_scale=1024.0, growth_interval=3),
    ],
)
def test_both_forms_of_the_loss_scaler(make: Callable[[], Any]) -> None:
    scaler = make()
    assert scaler.is_enabled()
    assert scaler.get_scale() == 1024.0
    assert scaler.get_growth_interval() == 3
    assert next(iter(inspect.signature(smp.amp.GradScaler).parameters)) == "init_scale"


def test_post_step_hook_runs_once_after_a_backward_pass() -> None:
    model = wrapped()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    seen: list[Any] = []

    def hook(given: Any, given_optimizer: Any) -> None:
        seen.append((given, given_optimizer, given.get_module()[0].weight.grad is not None))

    model.register_post_step_hook(hook)
    evaluate(model, torch.randn(4, 2))
    assert seen == []
    train(model, torch.randn(4, 2))
    train(model, torch.randn(4, 2))
    assert seen == [(model, optimizer, True)]


def test_post_step_hook_of_no_argument_and_its_handle() -> None:
    model = wrapped()
    seen: list[str] = []
    model.register_post_step_hook(lambda: seen.append("first"))
    model.register_post_step_hook(lambda: seen.append("removed")).remove()
    train(model, torch.randn(4, 2))
    model.register_post_step_hook(lambda: seen.append("later"))
    train(model, torch.randn(4, 2))
    assert seen == ["first", "later"]


def test_post_step_hook_must_be_callable() -> None:
    with pytest.raises(TypeError, match="callable; received int"):
        wrapped().register_post_step_hook(3)  # type: ignore[arg-type]


def test_post_partition_hook_gives_a_handle() -> None:
    with pytest.warns(UserWarning, match="partitioned already"):
        wrapped().register_post_partition_hook(lambda: None).remove()


def test_nothing_is_distributed_over_tensor_parallel_ranks() -> None:
    model = wrapped()
    assert list(model.distributed_modules()) == []
    assert not any(map(model.is_distributed_parameter, model.parameters()))
    assert not any(map(model.is_scaled_batch_parameter, model.parameters()))
    assert not any(map(model.is_distributed_buffer, model.buffers()))
    assert not any(map(model.is_scaled_batch_buffer, model.buffers()))


def test_the_two_reducers_cover_every_local_parameter_once() -> None:
    model = wrapped()
    names = [
        name
        for reducer in (
            model.default_reducer_named_parameters,
            model.scaled_batch_reducer_named_parameters,
        )
        for name, _ in reducer()
    ]
    assert sorted(names) == sorted(name for name, _ in model.local_named_parameters())


def test_smp_model_holds_the_class_that_programs_ask_for() -> None:
    assert isinstance(wrapped(), smp.model.DistributedModel)
    assert not isinstance(nn.Linear(2, 2), smp.model.DistributedModel)


def test_a_model_that_is_distributed_already_is_returned() -> None:
    model = smp.DistributedModel(nn.Linear(2, 2), backward_passes_per_step=2)
    assert smp.DistributedModel(model) is model
    assert smp.DistributedModel(model.get_module()) is model  # as Trainers do for evaluation
    assert smp.DistributedModel(model, backward_passes_per_step=2) is model
    assert type(model.get_module()) is nn.Linear
    assert model.data_parallel.options.backward_passes_per_step == 2
    with pytest.raises(ConfigError, match=r"backward_passes_per_step=2; received 3\. Leave"):
        smp.DistributedModel(model, backward_passes_per_step=3)
    with pytest.raises(ConfigError, match="trace_memory_usage=False; received True"):
        smp.DistributedModel(model, trace_memory_usage=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))  # type: ignore[no-any-return]


@pytest.mark.parametrize("tag", ["model.safetensors", "pytorch_model.bin"])
def test_weights_of_safetensors_are_resumed_by_either_name(tag: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    weight = torch.randn(5, 3)
    safetensors.save_file({"embed.weight": weight}, tmp_path / "model.safetensors")  # tied: once
    (tmp_path / "user_content.pt").touch()
    model = smp.DistributedModel(Tied())
    resume = functools.partial(smp.resume_from_checkpoint, tmp_path, partial=False, model=model)
    assert resume(tag) is None
    assert torch.equal(model.get_module().head.weight.cpu(), weight)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        resume("other.bin")
    safetensors.save_file({"other.weight": weight}, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"Missing key.*embed\.weight"):
        resume(tag)


# ---------------------------------------------------------------- the optimizer


class ScriptsOwn(torch.optim.SGD):
    loss_scale = 8.0

    def update_master_grads(self) -> str:
        return "updated"


def test_attributes_of_the_wrapped_optimizer_are_reached() -> None:
    model = wrapped()
    inner = ScriptsOwn(model.parameters(), lr=0.1)
    optimizer = smp.DistributedOptimizer(inner, static_loss_scale=None, dynamic_loss_scale=True)
    assert optimizer.optimizer is inner
    assert optimizer.loss_scale == 8.0
    assert optimizer.update_master_grads() == "updated"


def test_clip_master_grads_says_what_to_call() -> None:
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(wrapped().parameters(), lr=0.1))
    with pytest.raises(UnsupportedError, match=r"needs fp16 or bf16 .* clip with smp"):
        optimizer.clip_master_grads(1.0)


def test_accelerate_takes_the_optimizer_for_its_own() -> None:
    optimizer: Any = smp.DistributedOptimizer(torch.optim.SGD(wrapped().parameters(), lr=0.1))
    assert optimizer._is_accelerate_prepared
    assert optimizer.step_was_skipped is False


# ---------------------------------------------------------------- smp


def test_nothing_is_traced_with_one_partition() -> None:
    seen: list[tuple[bool, bool]] = []

    class Curious(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((smp.is_tracing(), isinstance(x, torch._subclasses.FakeTensor)))
            return super().forward(x)

    evaluate(smp.DistributedModel(Curious(2, 2)), torch.randn(4, 2))
    assert seen == [(False, False)] * 2
    assert smp.is_tracing() is False


def test_configuration_by_attribute() -> None:
    config = smp.state.cfg
    assert (config.fp16, config.prescaled_batch, config.shard_optimizer_state) == (False,) * 3


def test_nothing_to_translate() -> None:
    assert list(smp.state.module_manager.translate_functions) == []


def test_groups_and_ranks() -> None:
    assert smp.CommGroup.DP_GROUP is smp.DP_GROUP
    assert 0 in smp.get_tp_group()
    assert {"PP_RANK", "TP_RANK", "RDP_RANK"} <= set(smp.RankType.__members__)


def test_outputs_are_detached_and_joined() -> None:
    output = evaluate(wrapped(), torch.randn(4, 2))
    assert output.detach().concat().shape == (4, 3)


def test_a_method_can_be_a_step_function() -> None:
    class Trainer:
        @smp.step
        def train_step(self, model: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
            return type(self).__name__, model(x)

    name, output = Trainer().train_step(wrapped(), torch.randn(4, 2))
    assert name == "Trainer"
    assert output.concat().shape == (4, 3)


def test_hvd_average_grads_leaves_averaged_gradients() -> None:
    model = wrapped()
    train(model, torch.randn(4, 2))
    before = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    smp.hvd_average_grads()
    after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert before
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))  # type: ignore[arg-type]


# ---------------------------------------------------------------- creation


def test_tensor_parallelism_takes_any_keyword() -> None:
    with smp.tensor_parallelism(enabled=True, attention_in_fp32=True, fused_bias_gelu=True):
        assert type(nn.Linear(2, 2)) is nn.Linear
    smp.set_tensor_parallelism(nn.Linear(2, 2), False)


def made_in(*contexts: Any) -> nn.Sequential:
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("make", "are_distributed"),
    [
        (lambda: made_in(), False),
        (lambda: made_in(smp.tensor_parallelism()), False),
        (lambda: made_in(smp.model_creation()), False),
        (lambda: made_in(smp.model_creation(True)), True),
        (lambda: made_in(smp.model_creation(True), smp.tensor_parallelism(False)), False),
        (lambda: made_in(smp.tensor_parallelism(False), smp.model_creation(True)), True),
        (lambda: made_in(smp.model_creation(True), smp.tensor_parallelism(auto=True)), True),
        (lambda: made_in(smp.model_creation(True, auto=True)), True),
    ],
)
def test_model_creation_distributes_at_degree_one_too(
    make: Callable[[], nn.Sequential], are_distributed: bool
) -> None:
    plain = made_in()
    model = smp.DistributedModel(make())
    found = [isinstance(each, smp.nn.DistributedLinear) for each in model.get_module()]
    assert found == [are_distributed] * 2
    assert len(list(model.distributed_modules())) == 2 * are_distributed
    assert not any(map(model.is_distributed_parameter, model.parameters()))
    x = torch.randn(4, 4)
    train(model, x)
    plain(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=0, atol=0)
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def test_set_tensor_parallelism_takes_modules_out_at_degree_one() -> None:
    net = made_in(smp.model_creation(True))
    smp.set_tensor_parallelism(net[0], False)
    smp.set_tensor_parallelism(net[1], True)
    model = smp.DistributedModel(net)
    assert [type(each) for each in model.get_module()] == [nn.Linear, smp.nn.DistributedLinear]


def test_model_creation_sets_the_dtype() -> None:
    with smp.model_creation(tensor_parallelism=False, dtype=torch.float64, flash_attention=True):
        assert nn.Linear(2, 2).weight.dtype is torch.float64
    assert nn.Linear(2, 2).weight.dtype is torch.float32
    with pytest.raises(TypeError, match=r"floating-point torch\.dtype; received torch\.int64"):
        smp.model_creation(dtype=torch.int64).__enter__()


# ---------------------------------------------------------------- modules that scripts import


def test_version_compares_as_scripts_do() -> None:
    assert package.__version__ >= "1.10"


@pytest.mark.parametrize("name", ["backend.exceptions", "torch.exceptions"])
def test_every_class_of_exceptions_is_one(name: str) -> None:
    module = importlib.import_module(f"{ROOT}.{name}")
    classes = [each for _, each in inspect.getmembers(module, inspect.isclass)]
    assert ConfigError in classes
    assert all(issubclass(each, Exception) for each in classes)


def test_backend_exceptions_need_no_framework() -> None:
    program = f"import sys, {ROOT}.backend.exceptions; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("gpt2", "translate_hf_state_dict_to_smdistributed"),
        ("gptj", "translate_hf_gptj_state_dict_to_smdistributed_gptj"),
        *((model, f"translate_hf_state_dict_to_smdistributed_{model}") for model in TRANSLATED),
    ],
)
def test_translations_have_many_names(model: str, name: str) -> None:
    module = importlib.import_module(f"{ROOT}.torch.nn.huggingface.{model}")
    weight = torch.randn(4, 4)
    theirs = {
        "gpt2": "transformer.h.0.mlp.c_fc.weight",
        "gptj": "transformer.h.0.mlp.fc_in.weight",
        "gptneo": "transformer.h.0.mlp.c_fc.weight",
        "gptneox": "gpt_neox.layers.0.mlp.dense_h_to_4h.weight",
        "bert": "bert.encoder.layer.0.intermediate.dense.weight",
        "roberta": "roberta.encoder.layer.0.intermediate.dense.weight",
    }[model]
    ours = getattr(module, name)({theirs: weight}, max_seq_len=8)
    ((key, value),) = ours.items()
    assert key.endswith("seq_layers.0.output.dense1.weight")
    assert torch.equal(value, weight.t() if model == "gpt2" else weight)


def test_hooks_of_other_blocks_are_refused() -> None:
    module = importlib.import_module(f"{ROOT}.torch.nn.huggingface.gptj")
    with pytest.raises(UnsupportedError, match="get_hf_gptj_transformer_layer_hooks"):
        module.get_hf_gptj_transformer_layer_hooks()


def test_a_state_of_another_model_is_named() -> None:
    module = importlib.import_module(f"{ROOT}.torch.nn.huggingface.gpt2")
    with pytest.raises(CheckpointError, match=r"encoder\.x is no part of a GPT-2 model"):
        module.translate_hf_state_dict_to_smdistributed_gpt2({"encoder.x": torch.zeros(1)})


def test_no_other_name_is_a_translation() -> None:
    module = importlib.import_module(f"{ROOT}.torch.nn.huggingface.gpt2")
    with pytest.raises(AttributeError, match="no attribute 'tranlate'"):
        module.tranlate  # noqa: B018


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("test.torch.utils", "dump_model"),
        ("test.torch.utils", "verify"),
    ],
)
def test_functions_are_imported_and_refused(module: str, name: str) -> None:
    function = getattr(importlib.import_module(f"{ROOT}.{module}"), name)
    assert function.__name__ == name
    with pytest.raises(UnsupportedError, match=f"{name} is not supported yet"):
        function("folder", dtype=torch.float32)


@pytest.mark.parametrize("name", ["param_index_to_name_tp_group", "param_name_to_index_tp_group"])
def test_state_mod_is_imported_and_its_maps_refused(name: str) -> None:
    state_mod = importlib.import_module(f"{ROOT}.torch.state_mod")
    assert state_mod.state is smp.state
    with pytest.raises(UnsupportedError, match=f"{name} is not supported yet"):
        getattr(state_mod.state, name)


def test_utils() -> None:
    utils = importlib.import_module(f"{ROOT}.torch.utils")
    assert utils.rmsg("loss 1.0") == "rank 0: loss 1.0"
    assert utils.get_distribution_axis(nn.Linear(2, 2).weight) is None


# ---------------------------------------------------------------- configuration

UNDOCUMENTED = {
    "static_mode": True,
    "fast_mode": True,
    "checkpoint_attentions": False,
    "ddp_dist_backend": "auto",
    "_match_weights": False,
    "_fp32_grad_accumulation": True,
    "_prescaled_batch": False,
}


def test_undocumented_keys_are_accepted() -> None:
    config = load("pytorch", {"ddp": True, "skip_tracing": True, **UNDOCUMENTED}, environ={})
    assert config.ddp


def test_launch_beats_the_script_and_partitions_is_the_degree() -> None:
    environ = {
        "SM_HP_MP_PARAMETERS": '{"partitions": 2, "microbatches": 4}',
        "SM_FRAMEWORK_PARAMS": '{"sagemaker_mpi_enabled": true}',
    }
    config = load("pytorch", {"pipeline_parallel_degree": 4, "ddp": True}, environ=environ)
    assert (config.partitions, config.microbatches, config.ddp) == (2, 4, True)
