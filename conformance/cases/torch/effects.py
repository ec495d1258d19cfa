"""PyTorch: what parameters do, seen from outside: memory, numbers, files."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from conformance.adapters.base import WIDTH
from conformance.cases.torch.checkpoints import shared_folder
from conformance.cases.torch.model import SPLIT, trained, wanted_gradients
from conformance.cases.torch.training import after_steps, optimizer_of
from conformance.registry import torch_case

MICROBATCHES = 4


# What is kept


def watched_net() -> Any:
    """Returns two modules, each with a layer that it looks at when that has run."""
    import torch
    from torch import nn

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 4 * WIDTH)
            self.outer = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            between = torch.tanh(self.inner(x))
            self.between = weakref.ref(between)
            return self.outer(between)

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = Wide()
            self.kept: list[bool] = []

        def forward(self, x: Any) -> Any:
            x = self.wide(x)
            self.kept.append(self.wide.between() is not None)
            return x

    return nn.Sequential(Watch(), Watch())


def kept(adapter: Any, *, is_checkpointed: bool) -> list[bool]:
    """Returns, for each microbatch of this rank, whether what a layer computes was kept."""
    net = watched_net()
    model = adapter.smp.DistributedModel(net)
    for index, module in enumerate(net):
        adapter.smp.set_partition(module, index if adapter.smp.pp_size() > 1 else 0)
        if is_checkpointed:
            adapter.smp.set_activation_checkpointing(module.wide)
    trained(adapter, model)
    before = [len(module.kept) for module in net]
    trained(adapter, model)
    return [each for module, count in zip(net, before, strict=True) for each in module.kept[count:]]


@torch_case(
    "smp.set_activation_checkpointing",
    "compat.set_activation_checkpointing_forms",
    worlds=("alone", "pipeline"),
)
def checkpointed_modules_keep_no_activations(adapter: Any) -> None:
    each = MICROBATCHES * (2 if adapter.smp.pp_size() == 1 else 1)
    assert kept(adapter, is_checkpointed=False) == [True] * each
    assert kept(adapter, is_checkpointed=True) == [False] * each


# Random numbers


def masks(adapter: Any, model: Any, width: int = WIDTH) -> Any:
    """Returns the masks of one step, [microbatch, rows, width]."""
    import torch

    step = adapter.smp.step(lambda model, x: model(x))
    output = step(model, torch.ones(8, width, device=adapter.device))
    return output.stack().cpu()


@torch_case("torch.script_rules", worlds=("alone", "replicas", *SPLIT))
def masks_of_dropout_differ_between_microbatches_steps_and_replicas(adapter: Any) -> None:
    import torch
    from torch import nn

    torch.manual_seed(11 + adapter.smp.dp_rank())
    model = adapter.smp.DistributedModel(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
    # So wide that no two are alike by chance.
    first, second = masks(adapter, model, 64), masks(adapter, model, 64)
    found = adapter.smp.allgather([*first, *second], adapter.smp.DP_GROUP)
    drawn = [mask for replica in found for mask in replica]
    assert len(drawn) == 2 * MICROBATCHES * adapter.smp.dp_size()
    assert len({tuple(each.flatten().tolist()) for each in drawn}) == len(drawn)
    assert all(set(each.flatten().tolist()) <= {0.0, 4.0} for each in drawn)


@torch_case("torch.script_rules", worlds=("alone", *SPLIT))
def one_seed_gives_one_run(adapter: Any) -> None:
    import torch
    from torch import nn

    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(masks(adapter, adapter.smp.DistributedModel(nn.Sequential(nn.Dropout(0.5)))))
    assert torch.equal(*found)


@torch_case("torch.script_rules", worlds=("alone", *SPLIT))
def masks_go_by_the_module_and_the_step_not_by_what_was_drawn_before(adapter: Any) -> None:
    import torch
    from torch import nn

    class Drawing(nn.Module):
        times = 0

        def forward(self, x: Any) -> Any:
            for _ in range(self.times):
                nn.functional.dropout(x, 0.5)
            return x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Drawing(), nn.Dropout(0.5)

        def forward(self, x: Any) -> Any:
            return self.second(torch.ones_like(self.first(x)))

    def drawn(times: tuple[int, ...], chances: tuple[float, ...]) -> Any:
        torch.manual_seed(5 + adapter.smp.dp_rank())
        net = Net()
        model = adapter.smp.DistributedModel(net)
        for index, module in enumerate((net.first, net.second)):
            adapter.smp.set_partition(module, index % adapter.smp.pp_size())
        for net.first.times, net.second.p in zip(times, chances, strict=True):
            found = masks(adapter, model)
        return found

    always = drawn((1, 1, 1, 1), (0.5,) * 4)
    assert torch.equal(drawn((0, 0, 3, 3), (0.5,) * 4), always)
    # A step that draws nothing does not count.
    assert torch.equal(drawn((1, 2, 1, 2), (0.0, 0.0, 0.5, 0.5)), always)


# Gradients


@torch_case("torch.global_norm", worlds=("alone", *SPLIT))
def the_norm_is_of_the_kind_that_is_asked_for(adapter: Any) -> None:
    import torch

    wanted, _ = wanted_gradients(adapter)
    flat = torch.cat([each.flatten() for each in wanted.values()])
    for kind in (1.0, 2.0, 3.0, float("inf")):
        norm = flat.norm(kind)
        for clip in (torch.nn.utils.clip_grad_norm_, adapter.smp.clip_grad_norm_):
            model, _ = trained(adapter)
            got = clip(model.parameters(), 0.01, norm_type=kind)
            torch.testing.assert_close(got.cpu(), norm.cpu())
            for name, parameter in model.local_named_parameters():
                torch.testing.assert_close(parameter.grad, wanted[name] * (0.01 / (norm + 1e-6)))


@torch_case("torch.global_norm", worlds=("alone", *SPLIT))
def norms_below_the_bound_change_nothing(adapter: Any) -> None:
    import torch

    wanted, _ = wanted_gradients(adapter)
    model, _ = trained(adapter)
    adapter.smp.clip_grad_norm_(model.parameters(), 1e3)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name])


@torch_case("torch.global_norm", worlds=("alone", *SPLIT))
def a_norm_that_is_not_finite_is_an_error_on_request(adapter: Any) -> None:
    """On every rank, whichever has the gradient that is infinite."""
    import torch

    for clip in (torch.nn.utils.clip_grad_norm_, adapter.smp.clip_grad_norm_):
        model, _ = trained(adapter)
        if adapter.smp.pp_rank() == adapter.smp.pp_size() - 1:
            next(model.local_parameters()).grad.fill_(float("inf"))
        with pytest.raises(RuntimeError, match="error_if_nonfinite"):
            clip(model.parameters(), 0.01, error_if_nonfinite=True)
        assert not clip(model.parameters(), 0.01).isfinite()


@torch_case("config.ddp_dist_backend", worlds=("replicas",))
def gradients_travel_by_the_backend_of_the_configuration(adapter: Any) -> None:
    import torch

    group = adapter.smp.get_dp_process_group()
    wanted = "nccl" if adapter.device.type == "cuda" else "gloo"
    assert torch.distributed.get_backend(group) == wanted


# What a result keeps


@torch_case("smp.step(detach_outputs)", "smp.step", worlds=("alone", "pipeline"))
def outputs_are_detached_unless_asked_otherwise(adapter: Any) -> None:
    model = adapter.model()
    x = adapter.tensor(adapter.batch(8))
    assert not adapter.smp.step(lambda model, x: model(x))(model, x).outputs[0].requires_grad
    if adapter.smp.pp_size() == 1:
        attached = adapter.smp.step(detach_outputs=False)(lambda model, x: model(x))
        assert attached(model, x).outputs[0].requires_grad
    else:
        with pytest.raises(Exception, match="detach_outputs"):
            adapter.smp.step(detach_outputs=False)(lambda model, x: model(x))(model, x)


@torch_case("smp.set_activation_checkpointing(strategy)", worlds=("alone",))
def strategies_choose_what_is_kept(adapter: Any) -> None:
    import torch
    from torch import nn

    class Layer(nn.Linear):
        def forward(self, x: Any) -> Any:
            y = torch.tanh(super().forward(x))
            self.result = weakref.ref(y)
            return y

    class Watch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(4)))

        def forward(self, x: Any) -> Any:
            x = self.layers(x)
            self.kept = [layer.result() is not None for layer in self.layers[:3]]
            return x

    for strategy, wanted in (
        (None, [True, True, True]),
        ("each", [True, True, True]),
        ("group_2", [False, True, False]),
        ("contiguous", [False, False, False]),
    ):
        model = adapter.smp.DistributedModel(net := Watch())
        if strategy:
            adapter.smp.set_activation_checkpointing(net.layers, strategy=strategy)
        trained(adapter, model)
        assert net.kept == wanted, strategy


@torch_case("smp.set_activation_checkpointing(preserve_rng_state)", worlds=("alone", "pipeline"))
def masks_are_computed_again_if_they_are_preserved(adapter: Any) -> None:
    import torch
    from torch import nn

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.masks: list[Any] = []

        def forward(self, x: Any) -> Any:
            mask = nn.functional.dropout(torch.ones_like(x), 0.5)
            self.masks.append(mask)
            return x * mask * self.scale

    for preserves in (True, False):
        net = nn.Sequential(Dropped(), Dropped())
        model = adapter.smp.DistributedModel(net)
        for index, module in enumerate(net):
            adapter.smp.set_partition(module, index % adapter.smp.pp_size())
            adapter.smp.set_activation_checkpointing(module, preserve_rng_state=preserves)
        for _ in range(2):
            for module in net:
                module.masks.clear()
            trained(adapter, model)
        for module in net:
            drawn = [tuple(mask.flatten().tolist()) for mask in module.masks]
            assert len(drawn) in (0, 2 * MICROBATCHES)
            assert len(set(drawn)) == len(drawn) / (2 if preserves else 1)


@torch_case(
    "smp.DistributedModel(trace_memory_usage)",
    "smp.DistributedModel(trace_execution_times)",
    "smp.DistributedModel(trace_device)",
    worlds=("pipeline",),
)
def options_of_the_trace_change_no_number(adapter: Any) -> None:
    import torch

    wanted, _ = wanted_gradients(adapter)
    for options in ({"trace_execution_times": True}, {"trace_device": "cpu"}):
        options["trace_memory_usage"] = True
        model, _ = trained(adapter, adapter.smp.DistributedModel(adapter.net(), **options))
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name])


@torch_case("smp.DistributedModel(trace_memory_usage)", worlds=("pipeline",))
def memory_is_what_a_backward_pass_needs(adapter: Any) -> None:
    import torch
    from torch import nn

    class Passing(nn.Linear):
        """Makes much and keeps little."""

        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                for _ in range(64):
                    x.repeat(64, 1).sum()
            return super().forward(x)

    def memory(**options: bool) -> float:
        net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)], Passing(WIDTH, WIDTH))
        model, _ = trained(adapter, adapter.smp.DistributedModel(net, **options))
        placed = {each.name: each.memory for each in model.placement.assignment.placed}
        return placed["3"] / placed["2"]

    assert memory() > 10
    assert memory(trace_memory_usage=True) == 1


@torch_case("smp.DistributedModel(trace_execution_times)", worlds=("pipeline",))
def partitions_go_by_the_time_that_modules_take(adapter: Any) -> None:
    from torch import nn

    class Slow(nn.Linear):
        """Takes long, by operations that are not counted."""

        def forward(self, x: Any) -> Any:
            long = x.repeat(1000, 10).cumsum(0)
            return super().forward(x) + 0 * long.sin().exp().sum()

    def computes(**options: bool) -> float:
        net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)], Slow(WIDTH, WIDTH))
        model, _ = trained(adapter, adapter.smp.DistributedModel(net, **options))
        placed = {each.name: each.compute for each in model.placement.assignment.placed}
        return placed["3"] / placed["2"]

    assert computes() == 1
    assert computes(trace_execution_times=True) > 2


# Replicas


@torch_case("smp.DistributedModel(bucket_cap_mb)", worlds=("replicas", "both"))
def buckets_are_as_large_as_is_asked_for(adapter: Any) -> None:
    import torch

    def buckets(**options: Any) -> list[int]:
        sizes: list[int] = []

        def hook(state: Any, bucket: Any) -> Any:
            sizes.append(bucket.buffer().nbytes)
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model = adapter.smp.DistributedModel(adapter.net(), **options)
        model.register_comm_hook(None, hook)
        for _ in range(2):
            sizes.clear()
            trained(adapter, model)
        return sizes

    assert len(buckets()) == 1
    limit = 100
    several = buckets(bucket_cap_mb=limit / 2**20)
    assert len(several) > 1
    # A bucket closes with the gradient that fills it.
    assert max(several) <= limit + WIDTH * WIDTH * 4


@torch_case("smp.DistributedModel(broadcast_buffers)", worlds=("replicas",))
def buffers_stay_those_of_each_replica_on_request(adapter: Any) -> None:
    model = adapter.smp.DistributedModel(adapter.net(), broadcast_buffers=False)
    trained(adapter, model)
    (buffer,) = model.local_buffers()
    buffer.fill_(float(adapter.smp.rdp_rank()))
    trained(adapter, model)
    assert (buffer == adapter.smp.rdp_rank()).all()


@torch_case("smp.DistributedModel(gradient_as_bucket_view)", worlds=("replicas",))
def gradients_lie_in_their_bucket_on_request(adapter: Any) -> None:
    for is_view in (False, True):
        model = adapter.smp.DistributedModel(adapter.net(), gradient_as_bucket_view=is_view)
        for _ in range(2):
            trained(adapter, model)
        places = {each.grad.untyped_storage().data_ptr() for each in model.local_parameters()}
        assert (len(places) == 1) == is_view


# Checkpoints


def weights_of(model: Any) -> dict[str, Any]:
    """Returns this rank's weights, as numbers."""
    return {name: each.tolist() for name, each in model.local_named_parameters()}


@torch_case("smp.resume_from_checkpoint(tag)", worlds=("alone", "pipeline"))
def a_tag_chooses_a_checkpoint(adapter: Any) -> None:
    folder = shared_folder(adapter)
    model, optimizer = after_steps(adapter, 1)
    seen = {}
    for tag in ("one", "two"):
        seen[tag] = weights_of(model)
        adapter.smp.save_checkpoint(folder, tag, model=model, optimizer=optimizer)
        after_steps(adapter, 1, model, optimizer)
    for tag, wanted in (("one", "one"), ("two", "two"), (None, "two")):
        del model, optimizer
        gc.collect()
        optimizer = optimizer_of(adapter, model := adapter.model())
        adapter.smp.resume_from_checkpoint(folder, tag=tag)
        trained(adapter, model)
        assert weights_of(model) == seen[wanted], tag
        assert optimizer.local_state_dict()["state"]


@torch_case("smp.resume_from_checkpoint(strict)", worlds=("alone", "pipeline"))
def a_model_with_more_parameters_resumes_on_request(adapter: Any) -> None:
    from torch import nn

    def grown() -> Any:
        net = adapter.net()
        net.layers[3].extra = nn.Parameter(adapter.tensor(adapter.batch(1)).cpu())
        return adapter.smp.DistributedModel(net)

    folder = shared_folder(adapter)
    model, _ = after_steps(adapter, 1)
    adapter.smp.save_checkpoint(folder, "it", partial=False, model=model)
    saved = weights_of(model)
    del model, _
    gc.collect()
    model = grown()
    adapter.smp.resume_from_checkpoint(folder, tag="it", partial=False, strict=False)
    trained(adapter, model)
    found = adapter.smp.allgather(weights_of(model), adapter.smp.PP_GROUP)
    kept = {name: value for each in found for name, value in each.items()}
    wanted = adapter.smp.allgather(saved, adapter.smp.PP_GROUP)
    assert {name: value for each in wanted for name, value in each.items()}.items() <= kept.items()


@torch_case("smp.resume_from_checkpoint(load_optimizer)", worlds=("alone", "pipeline"))
def optimizers_are_left_alone_on_request(adapter: Any) -> None:
    folder = shared_folder(adapter)
    model, optimizer = after_steps(adapter, 2)
    adapter.smp.save_checkpoint(folder, "it", model=model, optimizer=optimizer)
    for is_loaded in (True, False):
        del model, optimizer
        gc.collect()
        model = adapter.model()
        optimizer = optimizer_of(adapter, model)
        adapter.smp.resume_from_checkpoint(folder, tag="it", load_optimizer=is_loaded)
        after_steps(adapter, 1, model, optimizer)
        steps = {float(each["step"]) for each in optimizer.local_state_dict()["state"].values()}
        assert steps == {3.0 if is_loaded else 1.0}
