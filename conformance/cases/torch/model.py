"""PyTorch: the distributed model, its gradients and its partition."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from conformance.adapters.base import WIDTH
from conformance.registry import torch_case

SPLIT = ("pipeline", "manual", "both")


def _mean_square(model: Any, x: Any) -> Any:
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def trained(adapter: Any, model: Any = None, body: Any = _mean_square, size: int = 8) -> Any:
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


@torch_case("smp.DistributedModel", "torch.gradients", worlds=("alone", "pipeline"))
def gradients_are_summed_over_microbatches_on_request(adapter: Any) -> None:
    import torch

    model = adapter.smp.DistributedModel(adapter.net(), average_grads_across_microbatches=False)
    trained(adapter, model)
    wanted, _ = wanted_gradients(adapter)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, 4 * wanted[name])


@torch_case("smp.DistributedModel", worlds=("replicas",))
def gradients_of_several_passes_are_summed_before_reduction(adapter: Any) -> None:
    import torch

    model = adapter.smp.DistributedModel(adapter.net(), backward_passes_per_step=2)
    trained(adapter, model)
    trained(adapter, model)
    wanted, _ = wanted_gradients(adapter)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * wanted[name])


@torch_case("smp.DistributedModel", worlds=("replicas", "both"))
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


@torch_case("smp.DistributedModel", worlds=("replicas",))
def buffers_come_from_the_first_replica_in_each_step(adapter: Any) -> None:
    model, _ = trained(adapter)
    (buffer,) = model.local_buffers()
    buffer.fill_(float(adapter.smp.rdp_rank()))
    trained(adapter, model)
    assert not buffer.any()


@torch_case("smp.DistributedModel", "config.C19", worlds=("alone",))
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


@torch_case("smp.DistributedModel.backward", worlds=("pipeline",))
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
    for flag in ("retain_graph", "create_graph"):

        def body(model: Any, x: Any, flag: str = flag) -> Any:
            loss = model(x).mean()
            model.backward(loss, **{flag: True})
            return loss

        with pytest.raises((TypeError, ValueError, RuntimeError), match=flag):
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


_LOCAL = ("parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules")


def _local_rows() -> tuple[str, ...]:
    return tuple(f"smp.DistributedModel.local_{name}" for name in _LOCAL)


@torch_case(*_local_rows(), "smp.DistributedModel.local_state_dict", worlds=SPLIT)
def what_is_local_needs_the_partition(adapter: Any) -> None:
    model = adapter.model()
    for name in (*_LOCAL, "state_dict"):
        with pytest.raises(RuntimeError, match="first call of a step"):
            list(getattr(model, f"local_{name}")())


def _names(adapter: Any, model: Any, what: str) -> list[list[str]]:
    own = [name for name, _ in getattr(model, f"local_named_{what}")()]
    found: list[list[str]] = adapter.smp.allgather(own, adapter.smp.PP_GROUP)
    return found


@torch_case(*_local_rows(), worlds=("alone", *SPLIT))
def everything_is_local_to_one_rank_of_a_pipeline(adapter: Any) -> None:
    model, _ = trained(adapter)
    plain = adapter.net()
    names = [name for names in _names(adapter, model, "parameters") for name in names]
    assert sorted(names) == sorted(name for name, _ in plain.named_parameters())
    # Buffers of a module that is split are on every rank that has a part of it.
    buffers = {name for names in _names(adapter, model, "buffers") for name in names}
    assert buffers == {name for name, _ in plain.named_buffers()}
    for what in ("parameters", "buffers"):
        unnamed = list(getattr(model, f"local_{what}")())
        named = [each for _, each in getattr(model, f"local_named_{what}")()]
        assert all(one is other for one, other in zip(unnamed, named, strict=True))
    modules = {name for names in _names(adapter, model, "modules") for name in names}
    assert {f"layers.{index}" for index in range(4)} <= modules
    assert len(list(model.local_modules())) == len(list(model.local_named_modules()))


@torch_case("smp.DistributedModel.local_parameters", "config.default_partition", worlds=("manual",))
def a_rank_may_have_no_parameters(adapter: Any) -> None:
    model, _ = trained(adapter)  # everything goes to the default partition
    assert bool(list(model.local_parameters())) == (adapter.smp.pp_rank() == 1)


@torch_case("smp.DistributedModel.local_state_dict", worlds=SPLIT)
def a_local_state_is_marked_as_partial(adapter: Any) -> None:
    model, _ = trained(adapter)
    state = model.local_state_dict()
    assert state.pop("_smp_is_partial") is True
    names = {name for name, _ in (*model.local_named_parameters(), *model.local_named_buffers())}
    assert set(state) == names


@torch_case("smp.DistributedModel.state_dict", "compat.state_dict_keywords", worlds=SPLIT)
def the_whole_state_is_that_of_the_plain_model(adapter: Any) -> None:
    import torch

    model, _ = trained(adapter)
    plain = adapter.net().state_dict()
    state = model.state_dict()
    assert list(state) == list(plain)
    for name, tensor in plain.items():
        torch.testing.assert_close(state[name].cpu(), tensor)
    adapter.net().load_state_dict(state)
    gathered = model.state_dict(gather_to_rank0=True)
    assert bool(gathered) == (adapter.smp.rank() == 0)


@torch_case("smp.DistributedModel.load_state_dict", worlds=("alone", *SPLIT))
def a_whole_state_is_loaded_before_or_after_the_partition(adapter: Any) -> None:
    import torch

    state = {name: tensor + 1 for name, tensor in adapter.net().state_dict().items()}
    for is_early in (True, False):
        model = adapter.model()
        if not is_early:
            trained(adapter, model)
        model.load_state_dict(state)
        trained(adapter, model)
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.detach().cpu(), state[name])


@torch_case("smp.DistributedModel.load_state_dict", "compat.state_dict_keywords", worlds=SPLIT)
def partial_states_are_merged(adapter: Any) -> None:
    import torch

    model, _ = trained(adapter)
    part = {
        name: value + 1 if torch.is_tensor(value) else value
        for name, value in model.local_state_dict().items()
    }
    plain = adapter.net().state_dict()
    for same in (True, False):
        other, _ = trained(adapter)
        other.load_state_dict(part, same_partition_load=same)
        for name, parameter in other.local_named_parameters():
            torch.testing.assert_close(parameter.detach().cpu(), plain[name] + 1)


@torch_case("smp.DistributedModel.load_state_dict", worlds=("alone", "pipeline"))
def keys_that_do_not_fit_are_torch_s_errors(adapter: Any) -> None:
    model, _ = trained(adapter)
    state = dict(adapter.net().state_dict())
    state["other"] = state.pop("layers.0.weight")
    for told in (r"Missing key.*layers\.0\.weight", "Unexpected key.*other"):
        with pytest.raises(RuntimeError, match=told):
            model.load_state_dict(state)
    model.load_state_dict(state, strict=False)


@torch_case("smp.DistributedModel.register_post_partition_hook", worlds=SPLIT)
def hooks_run_once_after_the_partition(adapter: Any) -> None:
    model = adapter.model()
    seen: list[object] = []

    def two(given: Any, optimizer: Any) -> None:
        assert given.partitioned
        seen.append((given is model, optimizer))

    model.register_post_partition_hook(lambda: seen.append("none"))
    model.register_post_partition_hook(two)
    model.register_post_partition_hook(lambda: seen.append("removed")).remove()
    assert not seen
    trained(adapter, model)
    trained(adapter, model)
    assert seen[0] == "none"
    assert seen[1][0] is True  # type: ignore[index]
    assert len(seen) == 2
    with pytest.raises(TypeError, match="callable"):
        adapter.model().register_post_partition_hook(3)
    with pytest.warns(UserWarning, match="partition"):
        model.register_post_partition_hook(lambda: seen.append("late"))


@torch_case("compat.register_post_step_hook", worlds=SPLIT)
def a_post_step_hook_runs_after_the_first_step(adapter: Any) -> None:
    model = adapter.model()
    seen: list[bool] = []
    model.register_post_step_hook(lambda given, optimizer: seen.append(given is model))
    for _ in range(2):
        trained(adapter, model)
    assert seen == [True]


@torch_case("smp.DistributedModel.cpu", worlds=SPLIT)
def cpu_gathers_the_whole_model(adapter: Any) -> None:
    import torch

    model, _ = trained(adapter)
    assert model.cpu() is model
    for name, tensor in adapter.net().state_dict().items():
        got = dict(model.get_module().state_dict())[name]
        assert got.device.type == "cpu"
        torch.testing.assert_close(got, tensor)


@torch_case("smp.DistributedModel.join", worlds=("replicas",))
def replicas_may_have_different_numbers_of_batches(adapter: Any) -> None:
    import torch

    smp = adapter.smp
    model = adapter.model()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = smp.step(_mean_square)
    with model.join():
        for number in range(1 + smp.dp_rank()):
            optimizer.zero_grad()
            step(model, adapter.tensor(adapter.batch(8, seed=number)))
            optimizer.step()
    states = smp.allgather({n: p.detach() for n, p in model.local_named_parameters()}, smp.WORLD)
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name])


@torch_case("smp.DistributedModel.join", worlds=("pipeline",))
def join_needs_ddp(adapter: Any) -> None:
    with pytest.raises(RuntimeError, match="ddp"), adapter.model().join():
        pass


@torch_case("smp.DistributedModel.register_comm_hook", worlds=("replicas", "both"))
def a_hook_reduces_in_place_of_the_library(adapter: Any) -> None:
    import torch
    import torch.distributed as dist

    smp = adapter.smp
    model = adapter.model()

    def halve(group: Any, bucket: Any) -> Any:
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
        # The hook averages over replicas and microbatches by itself.
        return work.then(lambda done: done.value()[0] / smp.dp_size() / 4 / 2)

    model.register_comm_hook(smp.get_dp_process_group(), halve)
    trained(adapter, model)
    wanted, _ = wanted_gradients(adapter)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name] / 2)


@torch_case("smp.DistributedModel.register_comm_hook", worlds=("pipeline",))
def a_hook_needs_ddp(adapter: Any) -> None:
    with pytest.raises(RuntimeError, match="ddp"):
        adapter.model().register_comm_hook(None, lambda state, bucket: None)


@torch_case("smp.DistributedModel.inherited_methods", worlds=("alone", *SPLIT))
def methods_of_modules_are_there(adapter: Any) -> None:
    model = adapter.model()
    assert len(list(model.parameters())) == 8
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


@torch_case("smp.partition", "config.C06", "config.auto_partition", worlds=("manual",))
def contexts_decide_the_partition(adapter: Any) -> None:
    from torch import nn

    smp = adapter.smp
    with smp.partition(0):
        first = nn.Linear(WIDTH, WIDTH)
        with smp.partition(1):
            second = nn.Linear(WIDTH, WIDTH)
        third = nn.Linear(WIDTH, WIDTH)
    rest = nn.Linear(WIDTH, WIDTH)
    model = smp.DistributedModel(nn.Sequential(first, second, third, rest))
    trained(adapter, model)
    names = _names(adapter, model, "parameters")
    assert [{name[0] for name in own} for own in names] == [{"0", "2"}, {"1", "3"}]
    for index in (-1, 2):
        with pytest.raises(ValueError, match=r"0|1"), smp.partition(index):
            pass


@torch_case("smp.partition", "config.C06", worlds=("pipeline",))
def contexts_are_ignored_where_the_library_decides(adapter: Any) -> None:
    with adapter.smp.partition(7):
        model = adapter.model()
    trained(adapter, model)
    assert all(_names(adapter, model, "parameters"))


@torch_case(
    "torch.in_use.smp_set_partition", "compat.set_partition_after_wrapping", worlds=("manual",)
)
def set_partition_moves_modules_of_a_finished_model(adapter: Any) -> None:
    model = adapter.model()
    adapter.smp.set_partition(model.get_module().layers[2], 0)
    trained(adapter, model)
    names = _names(adapter, model, "parameters")
    assert names[0] == ["layers.2.weight", "layers.2.bias"]
    with pytest.raises((RuntimeError, ValueError), match="partition"):
        adapter.smp.set_partition(model.get_module().layers[1], 0)


@torch_case("torch.manual_shared", worlds=("manual",))
def shared_parameters_stay_together(adapter: Any) -> None:
    model = adapter.model()
    layers = model.get_module().layers
    layers[0].weight = layers[3].weight
    adapter.smp.set_partition(layers[0], 0)
    with pytest.raises(ValueError, match=r"layers\.[03]"):
        trained(adapter, model)


@torch_case("torch.revisits", worlds=("manual",))
def a_microbatch_may_come_back_to_a_rank(adapter: Any) -> None:
    import torch

    model = adapter.model()
    for index in (0, 3):
        adapter.smp.set_partition(model.get_module().layers[index], 0)
    trained(adapter, model)
    wanted, _ = wanted_gradients(adapter)
    assert _names(adapter, model, "parameters")[0][0] == "layers.0.weight"
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name])


@torch_case("torch.gradients", "torch.revisits", worlds=("manual",))
def shared_values_gather_their_gradients(adapter: Any) -> None:
    """What several partitions read has the sum of their gradients."""
    import torch
    from torch import nn

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Any) -> Any:
            first = self.layers[0](x)
            second = torch.tanh(self.layers[1](first))
            third = torch.tanh(self.layers[2](second + first))
            return self.layers[3](third + first + second)

    net, plain = Skipping(), Skipping()
    model = adapter.smp.DistributedModel(net)
    for index in (0, 2):
        adapter.smp.set_partition(model.get_module().layers[index], 0)
    trained(adapter, model)
    plain(torch.from_numpy(adapter.batch(8))).square().mean().backward()
    wanted = {name: each.grad for name, each in plain.named_parameters()}
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), wanted[name])


@contextmanager
def _log() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("smdistributed.modelparallel")
    former = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        logger.removeHandler(handler)
        logger.setLevel(former)


@torch_case("torch.partition_tree", worlds=("pipeline",))
def the_partition_is_balanced_and_logged(adapter: Any) -> None:
    with _log() as log:
        model, _ = trained(adapter)
    assert [len(names) for names in _names(adapter, model, "parameters")] == [4, 4]
    if adapter.smp.rank() == 0:
        assert "Partition assignments:" in log.getvalue()


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
