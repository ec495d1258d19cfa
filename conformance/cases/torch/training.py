"""PyTorch: optimizers, loss scaling, checkpoints of activations, and scripts."""

from __future__ import annotations

import types
from typing import Any

from conformance.adapters.base import WIDTH
from conformance.cases.torch.model import SPLIT, trained
from conformance.registry import torch_case


def optimizer_of(adapter: Any, model: Any, **options: Any) -> Any:
    """Returns a DistributedOptimizer: Adam."""
    import torch

    return adapter.smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), **options)


def after_steps(adapter: Any, count: int, model: Any = None, optimizer: Any = None) -> Any:
    """Trains; returns model and optimizer."""
    model = model if model is not None else adapter.model()
    optimizer = optimizer if optimizer is not None else optimizer_of(adapter, model)
    for _ in range(count):
        optimizer.zero_grad()
        trained(adapter, model)
        optimizer.step()
    return model, optimizer


def plain_steps(adapter: Any, count: int) -> Any:
    """Trains the plain module on the examples of all replicas; returns module and optimizer."""
    import torch

    net = adapter.net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    batches = [torch.from_numpy(adapter.batch(8, seed=r)) for r in range(adapter.smp.dp_size())]
    for _ in range(count):
        optimizer.zero_grad()
        net(torch.cat(batches)).square().mean().backward()
        optimizer.step()
    return net, optimizer


@torch_case(
    "smp.DistributedOptimizer",
    "smp.DistributedOptimizer.step",
    worlds=("alone", "replicas", *SPLIT),
)
def steps_are_those_of_the_plain_optimizer(adapter: Any) -> None:
    import torch

    model, _ = after_steps(adapter, 3)
    plain = dict(plain_steps(adapter, 3)[0].named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(
            parameter.detach().cpu(), plain[name].detach(), atol=1e-5, rtol=0
        )


@torch_case("smp.DistributedOptimizer", "compat.optimizer_of_all_parameters_before_partition")
def the_optimizer_may_have_groups_of_all_parameters(adapter: Any) -> None:
    import torch

    model = adapter.model()
    layers = model.get_module().layers
    groups = [
        {"params": [layer.weight for layer in layers], "lr": 0.1},
        {"params": [layer.bias for layer in layers], "lr": 0.0},
    ]
    optimizer = adapter.smp.DistributedOptimizer(torch.optim.SGD(groups, lr=1.0))
    after_steps(adapter, 1, model, optimizer)
    plain = dict(adapter.net().named_parameters())
    for name, parameter in model.local_named_parameters():
        moved = not torch.equal(parameter.detach().cpu(), plain[name])
        assert moved == name.endswith("weight"), name


@torch_case(
    "torch.in_use.smp_DistributedOptimizer_kwargs_on_full_precision_runs", worlds=("alone",)
)
def options_of_loss_scaling_do_nothing_in_full_precision(adapter: Any) -> None:
    options = {"static_loss_scale": None, "dynamic_loss_scale": True}
    after_steps(adapter, 1, model := adapter.model(), optimizer_of(adapter, model, **options))


@torch_case("smp.DistributedOptimizer.state_dict", worlds=("alone", "pipeline"))
def the_state_of_the_optimizer_is_whole(adapter: Any) -> None:
    import torch

    _, optimizer = after_steps(adapter, 2)
    _, plain = plain_steps(adapter, 2)
    state = optimizer.state_dict()
    torch.testing.assert_close(state, plain.state_dict(), atol=1e-5, rtol=1e-4, check_device=False)
    plain.load_state_dict(state)


@torch_case(
    "smp.DistributedOptimizer.load_state_dict",
    "smp.DistributedOptimizer.local_state_dict",
    worlds=("alone", "pipeline"),
)
def training_goes_on_from_a_state(adapter: Any) -> None:
    import torch

    straight, _ = after_steps(adapter, 4)
    wanted = {name: each.detach().clone() for name, each in straight.local_named_parameters()}
    for kind in ("state_dict", "local_state_dict"):
        model, optimizer = after_steps(adapter, 2)
        state = getattr(optimizer, kind)()
        weights = model.state_dict()
        model = adapter.model()
        model.load_state_dict(weights)
        optimizer = optimizer_of(adapter, model)
        optimizer.load_state_dict(state)
        after_steps(adapter, 2, model, optimizer)
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.detach(), wanted[name])


@torch_case(
    "torch.in_use.DistributedOptimizer_local_state_dict_gather_if_shard",
    "compat.optimizer_local_state_dict_keywords",
)
def local_state_takes_the_keyword_of_sharding(adapter: Any) -> None:
    model, optimizer = after_steps(adapter, 1)
    for gather in (True, False):
        state = optimizer.local_state_dict(gather_if_shard=gather)
        assert len(state["state"]) == len(list(model.local_parameters()))


@torch_case(
    "smp.DistributedOptimizer.optimizer",
    "compat.optimizer_optimizer",
    "compat.attributes_of_the_wrapped_optimizer",
    worlds=("alone", "pipeline"),
)
def the_wrapped_optimizer_can_be_reached(adapter: Any) -> None:
    import torch

    plain = torch.optim.Adam((model := adapter.model()).parameters(), lr=0.1)
    plain.note = "mine"  # type: ignore[attr-defined]
    optimizer = adapter.smp.DistributedOptimizer(plain)
    assert optimizer.optimizer is plain
    assert optimizer.note == "mine"
    assert optimizer.param_groups[0]["lr"] == 0.1
    del model


@torch_case("smp.state.cfg.fp16", "compat.trainer_names", worlds=("alone", "pipeline"))
def the_configuration_can_be_read(adapter: Any) -> None:
    cfg = adapter.smp.state.cfg
    assert (cfg.fp16, cfg.prescaled_batch, cfg.shard_optimizer_state) == (False, False, False)
    assert adapter.smp.model.DistributedModel is not None
    list(adapter.smp.state.module_manager.translate_functions)


@torch_case("smp.amp.GradScaler", worlds=("alone", "pipeline", "both"))
def all_ranks_skip_the_same_updates(adapter: Any) -> None:
    import torch

    smp = adapter.smp
    model = adapter.model()
    optimizer = optimizer_of(adapter, model)
    scaler = smp.amp.GradScaler(init_scale=4.0, growth_interval=1)

    def body(model: Any, x: Any) -> Any:
        loss = model(x).square().mean()
        model.backward(scaler.scale(loss))
        return loss

    step = smp.step(body)
    x = adapter.tensor(adapter.batch(8, seed=smp.dp_rank()))
    scales = []
    for overflows in (False, True, False):
        optimizer.zero_grad()
        step(model, x)
        if overflows and smp.rank() == smp.size() - 1:  # there alone
            next(model.local_parameters()).grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 4.0, 8.0]
    plain = dict(plain_steps(adapter, 2)[0].named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(
            parameter.detach().cpu(), plain[name].detach(), atol=1e-5, rtol=0
        )


# Recomputing activations


@torch_case(
    "smp.set_activation_checkpointing(pack_args_as_tuple)",
    "smp.set_activation_checkpointing",
    "compat.set_activation_checkpointing_forms",
    worlds=("alone", "pipeline"),
)
def activations_are_computed_again(adapter: Any) -> None:
    import torch
    from torch import nn

    for strategy in ("each", "contiguous", "group_2"):
        torch.manual_seed(2)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        torch.manual_seed(2)
        plain = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        )
        model = adapter.smp.DistributedModel(net)
        adapter.smp.set_activation_checkpointing(
            model.get_module(), strategy=strategy, pack_args_as_tuple=False
        )
        model, output = trained(adapter, model)
        loss = plain(torch.from_numpy(adapter.batch(8))).square().mean()
        loss.backward()
        torch.testing.assert_close(output.reduce_mean().cpu(), loss.detach())
        wanted = dict(plain.named_parameters())
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad.cpu(), wanted[name].grad)


@torch_case(
    "smp.patches.checkpoint.checkpoint",
    "smp.patches.checkpoint.checkpoint_sequential",
    worlds=("alone", "pipeline"),
)
def forwards_can_ask_for_checkpoints(adapter: Any) -> None:
    import torch
    from torch import nn

    patches = adapter.smp.patches.checkpoint

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.one = nn.Linear(WIDTH, WIDTH)
            self.several = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

        def forward(self, x: Any) -> Any:
            x = patches.checkpoint(self.one, x)
            return patches.checkpoint_sequential(self.several, x, strategy="each")

    model, output = trained(adapter, adapter.smp.DistributedModel(Asking()))
    plain = Asking()
    loss = plain.several(plain.one(torch.from_numpy(adapter.batch(8)))).square().mean()
    loss.backward()
    torch.testing.assert_close(output.reduce_mean().cpu(), loss.detach())
    wanted = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), wanted[name].grad)


# Parameters that get their values late


@torch_case(
    "smp.delay_param_initialization(enabled)",
    "smp.delay_param_initialization",
    worlds=("pipeline",),
)
def parameters_can_wait_for_their_partition(adapter: Any) -> None:
    import torch
    from torch import nn

    plain = adapter.net()
    for enabled in (False, True):
        with adapter.smp.delay_param_initialization(enabled=enabled):
            large = nn.Linear(512, 512)
        assert large.weight.is_meta is enabled
    with adapter.smp.delay_param_initialization(enabled=True):
        net = adapter.net()
    model, _ = trained(adapter, adapter.smp.DistributedModel(net))
    assert all(not each.is_meta for each in model.local_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.detach().cpu(), dict(plain.named_parameters())[name])


@torch_case("smp.model_creation", worlds=("alone", "pipeline"))
def models_can_be_made_inside_a_context(adapter: Any) -> None:
    import torch

    with adapter.smp.model_creation(dtype=torch.float64):
        net = adapter.net()
    assert {each.dtype for each in net.parameters()} == {torch.float64}
    assert adapter.net().layers[0].weight.dtype == torch.float32


@torch_case(
    "smp.model_creation", "smp.DistributedModel.distributed_modules", worlds=("alone", "pipeline")
)
def models_made_for_slices_have_distributed_modules_at_any_degree(adapter: Any) -> None:
    import torch

    smp = adapter.smp
    with smp.model_creation(tensor_parallelism=True):
        net = adapter.net()
    model, output = trained(adapter, smp.DistributedModel(net))
    assert {type(each).__name__ for each in model.distributed_modules()} == {"DistributedLinear"}
    loss = adapter.net()(torch.from_numpy(adapter.batch(8))).square().mean()
    torch.testing.assert_close(output.reduce_mean().cpu(), loss.detach())


@torch_case("smp.DistributedModel", worlds=("alone", "pipeline"))
def a_model_is_distributed_once(adapter: Any) -> None:
    model = adapter.model()
    assert adapter.smp.DistributedModel(model) is model
    assert adapter.smp.DistributedModel(model.get_module()) is model


# Files


@torch_case("torch.data_workers", worlds=("alone",))
def loaders_may_have_workers(adapter: Any) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.from_numpy(adapter.batch(16)))
    model = adapter.model()
    step = adapter.smp.step(lambda model, x: model(x))
    for (x,) in DataLoader(data, batch_size=8, num_workers=2):
        step(model, adapter.tensor(x.numpy()))


@torch_case("torch.script_rules", "torch.sequential", worlds=SPLIT)
def a_script_by_the_rules_trains(adapter: Any) -> None:
    """Inputs on the device, the wrapper for the model, backward through it, means outside."""
    import torch
    from torch import nn

    torch.manual_seed(4)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    model = adapter.smp.DistributedModel(nn.Sequential(*layers))
    optimizer = optimizer_of(adapter, model)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        _, output = trained(adapter, model)
        optimizer.step()
        losses.append(output.reduce_mean().item())
    assert losses[-1] < losses[0] / 2


@torch_case("config.pipeline", "torch.request_model", worlds=("pipeline", "manual"))
def the_schedule_is_the_configured_one(adapter: Any) -> None:
    model = adapter.model()
    for index in range(2):
        adapter.smp.set_partition(model.get_module().layers[index], 0)
    step = adapter.smp.step(_mean)
    step(model, adapter.tensor(adapter.batch(8)))
    own = step.timeline().ranks[adapter.smp.pp_rank()]
    kinds = "".join(each.action.kind.name[0] for each in own)
    is_simple = adapter.smp.state.cfg.pipeline == "simple"
    assert kinds.count("F") == kinds.count("B") == 4
    assert (kinds == "FFFFBBBB") == is_simple, kinds


def _mean(model: Any, x: Any) -> Any:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


@torch_case("config.microbatches", worlds=("pipeline",))
def microbatches_are_counted_by_the_body(adapter: Any) -> None:
    output = adapter.smp.step(lambda model, x: model(x))(
        adapter.model(), adapter.tensor(adapter.batch(8))
    )
    assert len(output.outputs) == adapter.smp.state.cfg.microbatches == 4


@torch_case("compat.state_mod_imports", "torch.in_use.more_names_in_use", worlds=("new",))
def names_that_scripts_import_are_there(adapter: Any) -> None:
    import importlib

    package = "smdistributed.modelparallel"
    for module, names in (
        ("torch.state_mod", ("state",)),
        ("torch.utils", ("get_distribution_axis", "rmsg")),
        ("torch.nn", ("DistributedLinear", "FusedLayerNorm")),
        ("torch.optimizers", ("FusedLAMB", "FusedNovoGrad", "FusedLamb", "FusedAdam")),
        ("torch.amp", ("GradScaler",)),
        ("test.torch.utils", ("dump_model", "verify")),
    ):
        found = importlib.import_module(f"{package}.{module}")
        assert isinstance(found, types.ModuleType)
        for name in names:
            assert hasattr(found, name), f"{module}.{name}"


@torch_case("compat.names_of_test_helpers_and_fused_optimizers", worlds=("alone",))
def horovod_s_average_is_a_name(adapter: Any) -> None:
    assert callable(adapter.smp.hvd_average_grads)


@torch_case("smp.nn.FusedLayerNorm", worlds=("alone", "pipeline"))
def fused_layer_normalisation_is_torchs(adapter: Any) -> None:
    import torch

    fused, plain = adapter.smp.nn.FusedLayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
    assert not isinstance(plain, adapter.smp.nn.FusedLayerNorm)
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), fused)
    x = adapter.batch(8)
    want = plain(net[0](torch.from_numpy(x))).detach()
    got = adapter.smp.step(lambda model, x: model(x))(
        adapter.smp.DistributedModel(net), adapter.tensor(x)
    )
    torch.testing.assert_close(got.concat().cpu(), want, atol=1e-6, rtol=0)


def _fused_steps(adapter: Any, name: str) -> None:
    """Compares the steps of an optimizer over partitions with those over the plain module."""
    import torch

    kind = getattr(adapter.smp.optimizers, name)
    model = adapter.model()
    after_steps(
        adapter, 3, model, adapter.smp.DistributedOptimizer(kind(model.parameters(), lr=0.1))
    )
    net = adapter.net()
    optimizer = kind(net.parameters(), lr=0.1)
    batches = [torch.from_numpy(adapter.batch(8, seed=r)) for r in range(adapter.smp.dp_size())]
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.cat(batches)).square().mean().backward()
        optimizer.step()
    plain = dict(net.named_parameters())
    for each, parameter in model.local_named_parameters():
        torch.testing.assert_close(
            parameter.detach().cpu(), plain[each].detach(), atol=1e-5, rtol=0
        )


@torch_case("smp.optimizers.FusedAdam", worlds=("alone", *SPLIT))
def fused_adam_over_partitions(adapter: Any) -> None:
    _fused_steps(adapter, "FusedAdam")


@torch_case("smp.optimizers.FusedLamb", worlds=("alone", *SPLIT))
def fused_lamb_takes_norms_of_the_whole_model(adapter: Any) -> None:
    _fused_steps(adapter, "FusedLamb")


@torch_case("smp.optimizers.FusedNovoGrad", worlds=("alone", *SPLIT))
def fused_novograd_over_partitions(adapter: Any) -> None:
    _fused_steps(adapter, "FusedNovoGrad")
