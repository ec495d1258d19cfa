"""PyTorch: the distributed model, its gradients and its partition."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from conformance.adapters.base import WIDTH
from conformance.registry import torch_case

SPLIT = ("pipeline", "manual", "both")


def mean_square(model: Any, x: Any) -> Any:
    """Returns the loss of a step, after its backward pass."""
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def trained(adapter: Any, model: Any = None, body: Any = mean_square, size: int = 8) -> Any:
    """Runs one step on this replica's examples; returns the model and the step's result."""
    model = model if model is not None else adapter.model()
    x = adapter.tensor(adapter.batch(size, seed=adapter.smp.dp_rank()))
    return model, adapter.smp.step(body)(model, x)


def wanted_gradients(adapter: Any, size: int = 8) -> tuple[dict[str, Any], Any]:
    """Returns the gradients of the mean over all replicas' examples, and that loss."""
    import torch

    net = adapter.net().to(adapter.device)
    batches = [adapter.batch(size, seed=rank) for rank in range(adapter.smp.dp_size())]
    loss = net(torch.cat([adapter.tensor(each) for each in batches])).square().mean()
    loss.backward()
    return {name: each.grad for name, each in net.named_parameters()}, loss.detach()


@torch_case(
    "torch.gradients", "smp.DistributedModel.backward", worlds=("alone", "replicas", *SPLIT)
)
def gradients_are_those_of_the_global_batch(adapter: Any) -> None:
    import torch

    model, output = trained(adapter)
    wanted, loss = wanted_gradients(adapter)
    losses = adapter.smp.allgather(output.reduce_mean(), adapter.smp.DP_GROUP)
    torch.testing.assert_close(torch.stack(losses).mean(), loss.to(losses[0].device))
    seen = adapter.smp.allgather(
        [name for name, _ in model.local_named_parameters()], adapter.smp.PP_GROUP
    )
    assert sorted(name for names in seen for name in names) == sorted(wanted)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name])


@torch_case(
    "smp.DistributedModel(average_grads_across_microbatches)",
    "smp.DistributedModel",
    "torch.gradients",
    worlds=("alone", "pipeline"),
)
def gradients_are_summed_over_microbatches_on_request(adapter: Any) -> None:
    import torch

    model = adapter.smp.DistributedModel(adapter.net(), average_grads_across_microbatches=False)
    trained(adapter, model)
    wanted, _ = wanted_gradients(adapter)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, 4 * wanted[name])


@torch_case(
    "smp.DistributedModel(backward_passes_per_step)", "smp.DistributedModel", worlds=("replicas",)
)
def gradients_of_several_passes_are_summed_before_reduction(adapter: Any) -> None:
    import torch

    model = adapter.smp.DistributedModel(adapter.net(), backward_passes_per_step=2)
    trained(adapter, model)
    trained(adapter, model)
    wanted, _ = wanted_gradients(adapter)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * wanted[name])


@torch_case(
    "smp.DistributedModel(overlapping_allreduce)",
    "smp.DistributedModel",
    worlds=("replicas", "both"),
)
def gradients_are_the_same_however_they_are_reduced(adapter: Any) -> None:
    import torch

    wanted, _ = wanted_gradients(adapter)
    for options in (
        {"overlapping_allreduce": False},
        {"bucket_cap_mb": 0.0001},
        {"gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
    ):
        model, _ = trained(adapter, adapter.smp.DistributedModel(adapter.net(), **options))
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name])


@torch_case("smp.DistributedModel", "common.first_call", worlds=("replicas", "both"))
def replicas_start_with_the_weights_of_the_first(adapter: Any) -> None:
    import torch

    net = adapter.net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(adapter.smp.rdp_rank())
    model, _ = trained(adapter, adapter.smp.DistributedModel(net))
    plain = dict(adapter.net().named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.detach().cpu(), plain[name].detach())


@torch_case("smp.DistributedModel(broadcast_buffers)", "smp.DistributedModel", worlds=("replicas",))
def buffers_come_from_the_first_replica_in_each_step(adapter: Any) -> None:
    model, _ = trained(adapter)
    (buffer,) = model.local_buffers()
    buffer.fill_(float(adapter.smp.rdp_rank()))
    trained(adapter, model)
    assert not buffer.any()


@torch_case(
    "smp.DistributedModel(trace_execution_times)",
    "smp.DistributedModel",
    "config.C19",
    worlds=("alone",),
)
def options_that_exclude_each_other_are_refused(adapter: Any) -> None:
    make = adapter.smp.DistributedModel
    with pytest.raises(ValueError, match=r"trace_execution_times.*trace_device"):
        make(adapter.net(), trace_device="cpu", trace_execution_times=True)
    for options in ({"trace_device": "tpu"}, {"backward_passes_per_step": 0}):
        with pytest.raises((ValueError, TypeError), match=next(iter(options))):
            make(adapter.net(), **options)


@torch_case("smp.DistributedModel", worlds=("alone", "pipeline"))
def several_models_live_in_one_script(adapter: Any) -> None:
    import torch

    first, second = adapter.model(), adapter.model()

    def body(one: Any, other: Any, x: Any) -> Any:
        loss = other(one(x)).square().mean()
        one.backward(loss)
        return loss

    x = adapter.tensor(adapter.batch(8))
    output = adapter.smp.step(body)(first, second, x)
    net, other = adapter.net(), adapter.net()
    loss = other(net(x.cpu())).square().mean()
    torch.testing.assert_close(output.reduce_mean().cpu(), loss.detach())


@torch_case("smp.DistributedModel.__call__", worlds=("pipeline",))
def a_split_model_is_called_inside_a_step(adapter: Any) -> None:
    with pytest.raises(Exception, match=r"@smp\.step"):
        adapter.model()(adapter.tensor(adapter.batch(8)))


@torch_case("smp.DistributedModel.__call__", worlds=("alone", "replicas"))
def a_whole_model_is_called_anywhere(adapter: Any) -> None:
    import torch

    model = adapter.model()
    x = adapter.batch(8, seed=adapter.smp.dp_rank())
    loss = model(adapter.tensor(x)).square().mean()
    loss.backward()
    wanted, _ = wanted_gradients(adapter)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name])


@torch_case(
    "smp.DistributedModel.backward(grad_tensors)",
    "smp.DistributedModel.backward",
    worlds=("pipeline",),
)
def backward_takes_gradients_of_its_tensors(adapter: Any) -> None:
    import torch

    def body(model: Any, x: Any) -> Any:
        out = model(x)
        model.backward(out, torch.full_like(out, 0.5))
        return out

    model, _ = trained(adapter, body=body)
    net = adapter.net()
    out = net(torch.from_numpy(adapter.batch(8)))
    out.backward(torch.full_like(out, 0.5) / 4)
    wanted = {name: each.grad for name, each in net.named_parameters()}
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), wanted[name])


@torch_case("smp.DistributedModel.backward", worlds=("alone", "pipeline"))
def backward_keeps_no_graph(adapter: Any) -> None:
    def body(model: Any, x: Any) -> Any:
        loss = model(x).mean()
        model.backward(loss, create_graph=True)
        return loss

    with pytest.raises((TypeError, ValueError, RuntimeError), match="create_graph"):
        trained(adapter, body=body)


@torch_case("smp.DistributedModel.backward", worlds=("pipeline",))
def backward_belongs_inside_the_step(adapter: Any) -> None:
    model, _ = trained(adapter)
    with pytest.raises(Exception, match=r"@smp\.step"):
        model.backward(adapter.tensor(adapter.batch(1)).sum())


@torch_case("smp.DistributedModel.module", "compat.model_module_module", worlds=("alone", *SPLIT))
def the_user_s_model_is_two_hops_away(adapter: Any) -> None:
    net = adapter.net()
    model = adapter.smp.DistributedModel(net)
    assert model.module.module.layers is model.get_module().layers
    assert model.module.layers is model.get_module().layers
    assert all(name.startswith("module.") for name, _ in model.module.named_parameters())
    unwrapped = model
    while hasattr(unwrapped, "module"):
        unwrapped = unwrapped.module
    assert unwrapped is net


@torch_case(
    "torch.in_use.DistributedModel_get_module", "compat.get_module_before_partition", worlds=SPLIT
)
def get_module_is_the_user_s_model(adapter: Any) -> None:
    net = adapter.net()
    model = adapter.smp.DistributedModel(net)
    assert type(model.get_module()) is type(net)
    assert len(model.get_module().layers) == 4


@torch_case("smp.DistributedModel.partitioned", worlds=SPLIT)
def partitioned_turns_true_in_the_first_step(adapter: Any) -> None:
    model = adapter.model()
    assert model.partitioned is False
    trained(adapter, model)
    assert model.partitioned is True


@torch_case("smp.DistributedModel.partitioned", worlds=("alone", "replicas"))
def a_whole_model_is_partitioned_at_once(adapter: Any) -> None:
    assert adapter.model().partitioned is True


@torch_case("smp.DistributedModel.inherited_methods", worlds=("alone", *SPLIT))
def methods_of_modules_are_there(adapter: Any) -> None:
    net = adapter.net()
    names = [name for name, _ in net.named_parameters()]
    model = adapter.smp.DistributedModel(net)
    assert len(list(model.parameters())) == 8
    assert [name for name, _ in model.named_parameters()] == names
    assert set(names) <= set(model.state_dict())
    assert model.eval() is model
    assert not model.training
    assert not model.get_module().layers[0].training
    model.train()
    trained(adapter, model)
    model.zero_grad()
    assert all(each.grad is None for each in model.local_parameters())


@torch_case("torch.device_moves", worlds=SPLIT)
def moves_before_the_partition_do_nothing(adapter: Any) -> None:
    model = adapter.model()
    assert model.to("cpu") is model
    trained(adapter, model)
    assert all(each.device == adapter.device for each in model.local_parameters())


@torch_case("torch.global_norm", worlds=("alone", "replicas", *SPLIT))
def the_norm_of_gradients_is_the_whole_model_s(adapter: Any) -> None:
    import torch

    wanted, _ = wanted_gradients(adapter)
    norm = torch.stack([each.norm() for each in wanted.values()]).norm()
    for clip in (torch.nn.utils.clip_grad_norm_, adapter.smp.clip_grad_norm_):
        model, _ = trained(adapter)
        got = clip(model.parameters(), 0.01)
        torch.testing.assert_close(got.cpu(), norm.cpu())
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name] * (0.01 / (norm + 1e-6)))


# Partitions


@torch_case("torch.super_forward", worlds=("alone", "pipeline"))
def forwards_of_base_classes_can_be_called(adapter: Any) -> None:
    import torch
    from torch import nn

    class Doubled(nn.Linear):
        def forward(self, x: Any) -> Any:
            return 2 * super().forward(x)

    class AlsoDoubled(nn.Linear):
        def forward(self, x: Any) -> Any:
            return 2 * super()._orig_forward(x)  # type: ignore[misc]

    for kind in (Doubled, AlsoDoubled):
        torch.manual_seed(1)
        net = nn.Sequential(kind(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        plain = copy.deepcopy(net)
        x = adapter.batch(8)
        output = adapter.smp.step(lambda model, x: model(x))(
            adapter.smp.DistributedModel(net), adapter.tensor(x)
        )
        with torch.no_grad():
            first = nn.functional.linear(torch.from_numpy(x), plain[0].weight, plain[0].bias)
            wanted = plain[1](2 * first)
        torch.testing.assert_close(output.concat().cpu(), wanted)


@torch_case("compat.empty_tensors_on_other_ranks", "common.data_consistency", worlds=("pipeline",))
def only_the_first_rank_s_inputs_count(adapter: Any) -> None:
    import torch

    x = adapter.tensor(adapter.batch(8))
    given = x if adapter.is_first else torch.empty(8, 0, device=x.device)
    output = adapter.smp.step(lambda model, x: model(x))(adapter.model(), given)
    torch.testing.assert_close(
        output.concat().cpu(), torch.from_numpy(adapter.reference(adapter.batch(8)))
    )


@torch_case("smp.is_tracing", worlds=("pipeline",))
def code_can_tell_that_it_is_recorded(adapter: Any) -> None:
    seen: list[bool] = []

    def body(model: Any, x: Any) -> Any:
        seen.append(adapter.smp.is_tracing())
        return model(x)

    trained(adapter, body=body)
    assert seen[0] is True
    assert adapter.smp.is_tracing() is False


@torch_case("common.in_use.StepOutput_detach", worlds=("pipeline",))
def outputs_can_be_detached(adapter: Any) -> None:
    import torch

    output = adapter.smp.step(lambda model, x: model(x))(
        adapter.model(), adapter.tensor(adapter.batch(8))
    )
    detached = output.detach()
    assert isinstance(detached, adapter.smp.StepOutput)
    torch.testing.assert_close(detached.concat(), output.concat().detach())
    assert not any(each.requires_grad for each in detached.outputs)
