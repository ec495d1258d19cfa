"""Gradients over data-parallel ranks and partitions must be those of one process.

Long, since it is one list of cases.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from equality_cases import WIDTH, Tied, batch, mlp, predict_tokens, regress
from reference import (
    MICROBATCHES,
    assert_same_gradients,
    assert_same_results,
    own_share,
    run_plain,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_ as imported_before_init
from world import generator

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import SMPError


def pair(
    build: Callable[[], nn.Module] = mlp, **options: Any
) -> tuple[smp.DistributedModel, nn.Module]:
    torch.manual_seed(1)
    module = build()
    return smp.DistributedModel(module, **options), copy.deepcopy(module)


def train(
    model: smp.DistributedModel,
    reference: nn.Module,
    body: Any = regress,
    make: Any = batch,
    rounds: int = 3,
) -> None:
    """Steps on both sides with gradients cleared before each, and compares them."""
    step = smp.step(body)
    for _ in range(rounds):
        model.zero_grad()
        reference.zero_grad()
        data = make()
        expected = run_plain(reference, body, data)
        assert_same_results(step(model, *own_share(data, [0] * len(data))), expected)
        assert_same_gradients(model, reference)


class Launches:
    """Counts the buckets that have left when a step's backward passes are over."""

    def __init__(self, model: smp.DistributedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.early: list[int] = []
        self.total = 0
        reduction = model.data_parallel._reduction
        end = reduction.end

        def spy() -> None:
            self.early.append(len(reduction._futures))
            self.total = len(reduction._buckets)
            end()

        monkeypatch.setattr(reduction, "end", spy)


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "small_buckets": {"bucket_cap_mb": 0.001},
    "not_overlapped": {"overlapping_allreduce": False, "bucket_cap_mb": 0.001},
    "bucket_views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
}


def reduction_case(options: dict[str, Any]) -> Callable[[], None]:
    def case() -> None:
        for build, body, make in ((mlp, regress, batch), (Tied, predict_tokens, tokens)):
            model, reference = pair(build, **options)
            with pytest.MonkeyPatch.context() as monkeypatch:
                launches = Launches(model, monkeypatch)
                train(model, reference, body, make)
            if smp.dp_size() == 1:
                continue
            assert launches.total > 1 or "bucket_cap_mb" not in options
            overlapping = options.get("overlapping_allreduce", True)
            assert launches.early == [launches.total if overlapping else 0] * 3

    return case


def tokens() -> list[torch.Tensor]:
    return [torch.randint(11, (8 * smp.dp_size(), 6))]


def case_gradients_are_views_of_buckets() -> None:
    model, reference = pair(gradient_as_bucket_view=True)
    step = smp.step(regress)
    for _ in range(3):  # they add up in the buckets
        data = batch()
        run_plain(reference, regress, data)
        step(model, *own_share(data, [0, 0]))
        assert_same_gradients(model, reference)
    gradients = [parameter.grad for parameter in model.local_parameters()]
    storages = {each.untyped_storage().data_ptr() for each in gradients if each is not None}
    assert len(storages) == (1 if smp.dp_size() > 1 else len(gradients))


def case_gradients_stay_where_they_are() -> None:
    model, reference = pair()
    step = smp.step(regress)
    data = batch()
    run_plain(reference, regress, data)
    step(model, *own_share(data, [0, 0]))
    kept = [parameter.grad for parameter in model.local_parameters()]
    model.zero_grad(set_to_none=False)
    step(model, *own_share(data, [0, 0]))
    assert all(
        parameter.grad is old for parameter, old in zip(model.local_parameters(), kept, strict=True)
    )
    assert_same_gradients(model, reference)


class Branches(nn.Module):
    """Each example takes one of two branches; a third one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.routed = Routed()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.routed(torch.tanh(self.first(x)), x[:, 0] > 0))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positive = nn.Linear(WIDTH, WIDTH)
        self.negative = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, is_positive: torch.Tensor) -> Any:
        return self.positive(x) if is_positive.all() else self.negative(x)


def case_unused_parameters() -> None:
    """Replicas take different branches, and none takes the third."""

    def make() -> list[torch.Tensor]:
        x, y = batch()
        signs = torch.ones(smp.dp_size()).index_fill_(0, torch.tensor(0), -1.0)
        x[:, 0] = x[:, 0].abs() * signs.repeat_interleave(len(x) // smp.dp_size())
        return [x, y]

    for options in OPTIONS.values():
        model, reference = pair(Branches, **options)
        train(model, reference, make=make)
        for name, parameter in model.local_named_parameters():
            if "never" in name or "unused" in name:
                assert parameter.grad is None, name


def case_frozen_parameters_change() -> None:
    model, reference = pair(bucket_cap_mb=0.001)
    for frozen in ("0.", "4.", ""):
        for each in (model.get_module(), reference):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(not frozen or not name.startswith(frozen))
        train(model, reference, rounds=2)


def case_backward_passes_are_summed() -> None:
    for options in OPTIONS.values():
        model, reference = pair(backward_passes_per_step=2, **options)
        step = smp.step(regress)
        for _ in range(2):
            model.zero_grad()
            reference.zero_grad()
            for position in range(2):
                data = batch()
                run_plain(reference, regress, data)
                step(model, *own_share(data, [0, 0]))
                gradient = next(each.grad for each in model.local_parameters())
                assert gradient is not None
                on_replicas = smp.allgather(gradient.sum().item(), smp.DP_GROUP)
                assert len(set(on_replicas)) == (1 if position else smp.dp_size())
            assert_same_gradients(model, reference)


def case_accumulations_that_end_early() -> None:
    """What fewer steps have added up is reduced for an update, and what is cleared is forgotten."""
    for clear_by_model in (False, True):
        model, reference = pair(backward_passes_per_step=3)
        step = smp.step(regress)
        optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference)
        ]
        optimizers[0] = smp.DistributedOptimizer(optimizers[0])

        def pass_through(model: Any = model, reference: Any = reference, step: Any = step) -> None:
            data = batch()
            run_plain(reference, regress, data)
            step(model, *own_share(data, [0, 0]))

        for counts in ((2, 2), (1, 3), (0, 1)):
            for _each in range(counts[0]):
                pass_through()
            (model if clear_by_model else optimizers[0]).zero_grad()
            reference.zero_grad()
            for _each in range(counts[1]):
                pass_through()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            state = model.state_dict()
            for name, parameter in reference.named_parameters():
                torch.testing.assert_close(state[name], parameter.detach())


def scaled(reference: nn.Module, factor: float) -> None:
    for parameter in reference.parameters():
        if parameter.grad is not None:
            parameter.grad *= factor


def case_communication_hook() -> None:
    """Neither replicas nor microbatches are averaged by the library."""
    seen: list[torch.distributed.GradBucket] = []

    def hook(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Any]:
        assert isinstance(bucket, torch.distributed.GradBucket)
        assert state == "state"
        assert len(bucket.gradients()) == len(bucket.parameters())
        seen.append(bucket)
        return default_hooks.allreduce_hook(smp.get_dp_process_group(), bucket)

    model, reference = pair(bucket_cap_mb=0.001)
    model.register_comm_hook("state", hook)
    step = smp.step(regress)
    for _ in range(2):
        seen.clear()
        model.zero_grad()
        reference.zero_grad()
        data = batch()
        run_plain(reference, regress, data)
        step(model, *own_share(data, [0, 0]))
        scaled(reference, MICROBATCHES)
        assert_same_gradients(model, reference)
        assert [bucket.index() for bucket in seen] == list(range(len(seen)))
        assert [bucket.is_last() for bucket in seen] == [False] * (len(seen) - 1) + [True]
        assert len(seen) > 1


def case_torchs_hooks() -> None:
    group = smp.get_dp_process_group()
    power = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=WIDTH, start_powerSGD_iter=2, min_compression_rate=0.01
    )
    for state, hook, tolerance in (
        (group, default_hooks.fp16_compress_hook, 2e-3),
        (group, default_hooks.bf16_compress_hook, 2e-2),
        (power, powerSGD_hook.powerSGD_hook, 1e-3),
    ):
        model, reference = pair()
        model._register_comm_hook(state, hook)
        step = smp.step(regress)
        for _ in range(4):
            model.zero_grad()
            reference.zero_grad()
            data = batch()
            run_plain(reference, regress, data)
            scaled(reference, MICROBATCHES)
            step(model, *own_share(data, [0, 0]))
            expected = dict(reference.named_parameters())
            for name, parameter in model.local_named_parameters():
                want = expected[name].grad
                assert parameter.grad is not None
                assert want is not None
                error = (parameter.grad - want).norm() / want.norm()
                assert error <= tolerance, (hook, name, error)


def case_hook_errors() -> None:
    model, _ = pair()
    with pytest.raises(TypeError, match="callable; received int"):
        model.register_comm_hook(None, 3)
    model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(RuntimeError, match="registered already"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    if smp.pp_size() == 1:  # where no peer waits for the rest of the step
        with pytest.raises(TypeError, match="must return a"):
            smp.step(regress)(model, *own_share(batch(), [0, 0]))
    model, _ = pair(overlapping_allreduce=False)
    with pytest.raises(RuntimeError, match="overlapping_allreduce"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    model, _ = pair()
    smp.step(regress)(model, *own_share(batch(), [0, 0]))
    with pytest.raises(RuntimeError, match="before the first backward pass"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)


def join_case(divide_by_initial_world_size: bool) -> Callable[[], None]:
    def case() -> None:
        counts = [3, 5] + [4] * (smp.dp_size() - 2)
        model, reference = pair(Buffered, bucket_cap_mb=0.001)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        plain_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        step = smp.step(regress)
        for _ in range(2):  # and once more, to see that nothing is left of the first time
            every = [list(_batches(rank, count)) for rank, count in enumerate(counts)]
            for position in range(max(counts)):
                present = [each[position] for each in every if position < len(each)]
                plain_optimizer.zero_grad()
                divisor = smp.dp_size() if divide_by_initial_world_size else len(present)
                for x, y in present:
                    (F.mse_loss(reference(x), y) / divisor).backward()
                plain_optimizer.step()
            with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
                for x, y in every[smp.dp_rank()]:
                    optimizer.zero_grad()
                    step(model, x, y)
                    optimizer.step()
            state = reference.state_dict()
            for name, parameter in model.local_named_parameters():
                torch.testing.assert_close(parameter.detach(), state[name])

    return case


def _batches(rank: int, num: int) -> Iterator[list[torch.Tensor]]:
    numbers = generator(rank)
    for _ in range(num):
        yield [torch.randn(8, WIDTH, generator=numbers) for _ in range(2)]


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.register_buffer("offset", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x + self.offset)


def case_join_stops_early_on_request() -> None:
    model, _ = pair()
    step = smp.step(regress)
    count = 2 if smp.dp_rank() == 0 else 4

    def run() -> None:
        with model.join(throw_on_early_termination=True):
            for x, y in _batches(0, count):
                step(model, x, y)

    with pytest.raises(RuntimeError, match="exhausted"):
        run()
    smp.barrier()
    train(*pair(), rounds=1)


def case_without_overlap_of_surprises() -> None:
    """A second backward pass that nobody could foresee is an error, and no wrong gradient."""
    if smp.pp_size() > 1:
        return

    calls = [0]

    def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        calls[0] += 1
        model.backward(F.mse_loss(model(x), y))
        if calls[0] == MICROBATCHES:
            model.backward(F.mse_loss(model(x), y))

    for overlapping in (True, False):
        model, _ = pair(overlapping_allreduce=overlapping)
        step = smp.step(body)
        data = own_share(batch(), [0, 0])
        calls[0] = MICROBATCHES  # the first step is as usual
        step(model, *data)
        calls[0] = 0
        if overlapping:
            with pytest.raises(SMPError, match="overlapping_allreduce=False"):
                step(model, *data)
        else:
            step(model, *data)


def case_two_models_of_one_loss() -> None:
    torch.manual_seed(1)
    modules = [mlp(4), mlp(4)]
    references = [copy.deepcopy(module) for module in modules]
    models = [smp.DistributedModel(module) for module in modules]

    def both(x: torch.Tensor, y: torch.Tensor) -> None:
        models[0].backward(F.mse_loss(models[1](models[0](x)), y))

    data = batch()
    run_plain(nn.Sequential(*references), regress, data)
    smp.step(both)(*own_share(data, [0, 0]))
    for model, reference in zip(models, references, strict=True):
        assert_same_gradients(model, reference)


def case_a_step_without_a_backward_pass() -> None:
    """The gradients of one step are not taken for those of the next one."""
    layers = nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)
    model = smp.DistributedModel(nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def step(inputs: torch.Tensor, *, trains: bool) -> None:
        if trains:
            model.backward(model(inputs).mean())

    def train(*, trains: bool) -> None:
        optimizer.zero_grad()
        step(torch.ones(MICROBATCHES, 2), trains=trains)
        optimizer.step()

    train(trains=True)
    if smp.dp_rank():
        train(trains=False)
    with pytest.raises(SMPError, match="reduce the gradients of a step together"):
        train(trains=True)


def case_backward_outside_a_step() -> None:
    if smp.pp_size() > 1:
        return
    model, reference = pair(bucket_cap_mb=0.001)
    for _ in range(3):
        model.zero_grad()
        reference.zero_grad()
        x, y = batch()
        F.mse_loss(reference(x), y).backward()
        x, y = own_share([x, y], [0, 0])
        F.mse_loss(model(x), y).backward()
        assert_same_gradients(model, reference)


def case_argument_errors() -> None:
    for options, error in (
        ({"bucket_cap_mb": 0}, ValueError),
        ({"bucket_cap_mb": "25"}, TypeError),
        ({"backward_passes_per_step": 0}, ValueError),
        ({"backward_passes_per_step": True}, TypeError),
        ({"backward_passes_per_step": 1.5}, TypeError),
        ({"overlapping_allreduce": 1}, TypeError),
    ):
        (name,) = options
        with pytest.raises(error, match=name):
            smp.DistributedModel(mlp(), **options)


# ---------------------------------------------------------------------- norms


def clip_case(name: str, order: float) -> Callable[[], None]:
    def case() -> None:
        clip = {
            "imported": imported_before_init,
            "torch": torch.nn.utils.clip_grad_norm_,
            "smp": smp.clip_grad_norm_,
        }[name]
        for build, body, make in ((mlp, regress, batch), (Tied, predict_tokens, tokens)):
            model, reference = pair(build)
            train(model, reference, body, make, rounds=1)
            given = model if name == "smp" else model.parameters()
            norm = clip(given, 0.01, norm_type=order)
            want = total_norm(reference.parameters(), order)
            torch.testing.assert_close(norm, want)
            torch.nn.utils.clip_grads_with_norm_(reference.parameters(), 0.01, want)
            assert_same_gradients(model, reference)

    return case


def total_norm(parameters: Any, order: float) -> torch.Tensor:
    gradients = [parameter.grad for parameter in parameters]
    norms = torch.stack([torch.linalg.vector_norm(each, order) for each in gradients])
    return torch.linalg.vector_norm(norms, order)


def case_norm_of_other_tensors_is_torchs() -> None:
    # Different on every rank, and not at all on some: a collective would show.
    if smp.rank() == 0:
        module = nn.Linear(3, 3)
        norm = imported_before_init(module.parameters(), 1.0)
        assert norm == 0.0
        module(torch.ones(2, 3)).sum().backward()
        want = total_norm(module.parameters(), 2.0)
        gradients = [parameter.grad for parameter in module.parameters()]
        torch.testing.assert_close(torch.nn.utils.get_total_norm(gradients), want)
        torch.testing.assert_close(imported_before_init(module.parameters(), 1.0), want)
        torch.testing.assert_close(total_norm(module.parameters(), 2.0), torch.tensor(1.0))


def case_total_norm_of_gradients() -> None:
    model, reference = pair()
    train(model, reference, rounds=1)
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    torch.testing.assert_close(norm, total_norm(reference.parameters(), 2.0))


def case_a_rank_without_parameters() -> None:
    model, reference = pair(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    smp.step(regress)(model, *own_share(batch(), [0, 0]))
    norm = smp.clip_grad_norm_(list(model.local_parameters()), 1e-3)
    assert norm > 0
    assert len(set(smp.allgather(norm.item(), smp.PP_GROUP))) == 1
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = smp.amp.GradScaler()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536.0
    del reference


def case_nonfinite_norm() -> None:
    model, reference = pair()
    train(model, reference, rounds=1)
    if smp.pp_rank() == smp.pp_size() - 1:
        next(model.local_parameters()).grad[0] = float("inf")
    with pytest.raises(RuntimeError, match="norm of order 2"):
        smp.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert smp.clip_grad_norm_(model, 1.0).isinf()


# ---------------------------------------------------------------------- loss scaling


def scaler_case(make_scaler: Callable[[], torch.amp.GradScaler]) -> Callable[[], None]:
    def case() -> None:
        torch.manual_seed(1)
        module = mlp()
        reference = copy.deepcopy(module)
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        plain_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        scaler, plain_scaler = (
            make_scaler(),
            torch.amp.GradScaler(torch.get_default_device().type, growth_interval=2),
        )

        def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.mse_loss(model(x), y)
            used = scaler if isinstance(model, smp.DistributedModel) else plain_scaler
            model.backward(used.scale(loss))
            return loss

        step = smp.step(body)
        scales = []
        for round_ in range(6):
            optimizer.zero_grad()
            plain_optimizer.zero_grad()
            data = batch()
            expected = run_plain(reference, body, data)
            got = step(model, *own_share(data, [0, 0]))
            assert_same_results(got, expected)
            if round_ == 2:  # on one partition only
                next(reference.parameters()).grad[0, 0] = float("inf")
                first = next(iter(model.get_module().parameters()))
                if first.grad is not None:
                    first.grad[0, 0] = float("inf")
            if round_ % 2:
                scaler.unscale_(optimizer)
                plain_scaler.unscale_(plain_optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                want = total_norm(reference.parameters(), 2.0)
                torch.testing.assert_close(norm, want)
                torch.nn.utils.clip_grads_with_norm_(reference.parameters(), 0.05, want)
            scaler.step(optimizer)
            plain_scaler.step(plain_optimizer)
            scaler.update()
            plain_scaler.update()
            scales.append(scaler.get_scale())
            assert scaler.get_scale() == plain_scaler.get_scale()
            state = reference.state_dict()
            for name, parameter in model.local_named_parameters():
                torch.testing.assert_close(parameter.detach(), state[name], rtol=1e-4, atol=1e-5)
        assert scales == [2.0**power for power in (16, 17, 16, 16, 17, 17)]

    return case


def case_a_fused_optimizer_is_scaled() -> None:
    model, reference = pair()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
    plain_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    scaler = smp.amp.GradScaler()

    def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.mse_loss(model(x), y)
        model.backward(scaler.scale(loss) if isinstance(model, smp.DistributedModel) else loss)

    data = batch()
    run_plain(reference, body, data)
    plain_optimizer.step()
    smp.step(body)(model, *own_share(data, [0, 0]))
    scaler.step(optimizer)
    scaler.update()
    state = reference.state_dict()
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.detach(), state[name])


REPLICATED = {
    **{f"reduction_{name}": reduction_case(options) for name, options in OPTIONS.items()},
    "gradients_are_views_of_buckets": case_gradients_are_views_of_buckets,
    "gradients_stay_where_they_are": case_gradients_stay_where_they_are,
    "unused_parameters": case_unused_parameters,
    "frozen_parameters_change": case_frozen_parameters_change,
    "backward_passes_are_summed": case_backward_passes_are_summed,
    "accumulations_that_end_early": case_accumulations_that_end_early,
    "communication_hook": case_communication_hook,
    "torchs_hooks": case_torchs_hooks,
    "hook_errors": case_hook_errors,
    "join": join_case(True),
    "join_dividing_by_active": join_case(False),
    "join_stops_early_on_request": case_join_stops_early_on_request,
    "unforeseen_backward_passes": case_without_overlap_of_surprises,
    "two_models_of_one_loss": case_two_models_of_one_loss,
    "a_step_without_a_backward_pass": case_a_step_without_a_backward_pass,
    "backward_outside_a_step": case_backward_outside_a_step,
    "argument_errors": case_argument_errors,
}
PARTITIONED = {
    **{
        f"clip_{name}_{order}": clip_case(name, order)
        for name, order in (
            ("imported", 2.0),
            ("imported", float("inf")),
            ("torch", 1.0),
            ("smp", 2.0),
        )
    },
    "norm_of_other_tensors_is_torchs": case_norm_of_other_tensors_is_torchs,
    "total_norm_of_gradients": case_total_norm_of_gradients,
    "a_rank_without_parameters": case_a_rank_without_parameters,
    "nonfinite_norm": case_nonfinite_norm,
    "scaler": scaler_case(lambda: smp.amp.GradScaler(growth_interval=2)),
    "torchs_scaler": scaler_case(
        lambda: torch.amp.GradScaler(torch.get_default_device().type, growth_interval=2)
    ),
    "a_fused_optimizer_is_scaled": case_a_fused_optimizer_is_scaled,
}
#: What replicas and partitions could spoil only together.
BOTH = {
    name: PARTITIONED[name]
    for name in ("clip_imported_2.0", "norm_of_other_tensors_is_torchs", "scaler")
}
