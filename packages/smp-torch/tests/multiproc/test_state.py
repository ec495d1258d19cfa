"""States of model and optimizer over two partitions: what is whole, what is a part, what fails."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from world import compute_here, manual_pipeline, run, run_fresh

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import (
    CheckpointError,
    CommError,
    NotPartitionedError,
)
from smdistributed.modelparallel.common.testing import Worlds, cases_of

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

WIDTH = 4
CONFIG = {
    "pipeline_parallel_degree": 2,
    "microbatches": 2,
    "auto_partition": False,
    "default_partition": 0,
}


class Counter(nn.Module):
    """Passes its input on; has a buffer that is not saved, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = 0
        self.register_buffer("unsaved", torch.zeros(1), persistent=False)

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0


class Net(nn.Module):
    """The first and the last layer share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.counter = Counter()
        self.c = nn.Linear(WIDTH, WIDTH)
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c(self.counter(self.norm(self.b(self.a(x)))))
        return out


SECOND = ("b", "norm", "counter")


def build(second: tuple[str, ...] = SECOND, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    net = Net()
    for name in second:
        smp.set_partition(net.get_submodule(name), 1)
    return smp.DistributedModel(net)


@smp.step
def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = (model(x) - x).square().mean()
    model.backward(loss)
    return loss


def train(model: Any, optimizer: Any = None, steps: int = 1) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        losses.append(train_step(model, torch.randn(8, WIDTH)).reduce_mean().item())
        if optimizer is not None:
            optimizer.step()
    return losses


def plain_train(net: nn.Module, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        net.zero_grad()
        for x in torch.randn(8, WIDTH).chunk(2):
            ((net(x) - x).square().mean() / 2).backward()
        optimizer.step()


def assert_same(got: Any, expected: Any) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(got[name], value), name
        else:
            assert got[name] == value, name


def case_whole_state_is_that_of_the_plain_model() -> None:
    model = build()
    net = copy.deepcopy(model.get_module())
    train(model)
    state = model.state_dict()
    assert list(state) == list(net.state_dict())
    assert state._metadata == net.state_dict()._metadata
    net.load_state_dict(state)
    on_zero = model.state_dict(gather_to_rank0=True)
    assert_same(on_zero, state if smp.rank() == 0 else {})
    assert list(model.state_dict(prefix="x.")) == [f"x.{name}" for name in state]
    for whole in (state, on_zero) if smp.rank() == 0 else (state,):
        assert whole["a.weight"] is whole["c.weight"]  # as tied names of one process share memory


class Twice(Net):
    """Has a module in two places, of which the other one is on another partition."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.norm


def case_a_module_in_two_places_has_both_names_in_every_state() -> None:
    torch.manual_seed(0)
    net = Twice()
    smp.set_partition(net.norm, 1)
    model = smp.DistributedModel(net)
    copied = copy.deepcopy(net)
    train(model)
    state = model.state_dict()
    assert list(state) == list(copied.state_dict())
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    for name in names:
        assert state[f"norm.{name}"] is state[f"again.{name}"]
    here = {name for name in model.local_state_dict() if name.startswith(("norm.", "again."))}
    wanted = {f"{place}.{name}" for place in ("norm", "again") for name in names}
    assert here == (wanted if smp.pp_rank() == 1 else set())
    state = {
        name: torch.full_like(each, 2) if "norm" in name or "again" in name else each
        for name, each in state.items()
        if isinstance(each, torch.Tensor)
    }
    model.load_state_dict(state, strict=False)
    assert_same({name: model.state_dict()[name] for name in state}, state)


def case_whole_state_is_loaded_before_and_after_the_partition() -> None:
    source = build(seed=1)
    source.get_module().counter.extra = 7
    train(source)
    state = source.state_dict()
    for first in (True, False):
        model = build(second=("a", "c"))
        if not first:
            train(model)
        keys = model.load_state_dict(state)
        assert not keys.missing_keys
        assert not keys.unexpected_keys
        if first:
            smp.step(lambda model, x: model(x))(model.eval(), torch.ones(4, WIDTH))
        assert_same(model.state_dict(), state)


def case_parts_merge_under_another_partition() -> None:
    source = build(seed=1)
    train(source)
    state, part = source.state_dict(), source.local_state_dict()
    assert part["_smp_is_partial"] is True
    assert {name.partition(".")[0] for name in part} - {"_smp_is_partial"} == set(
        SECOND if smp.pp_rank() else ("a", "c")
    )
    model = build(second=("a", "c"))
    train(model)
    model.load_state_dict(part)
    assert_same(model.state_dict(), state)


def case_same_partition_is_loaded_as_it_is() -> None:
    source = build(seed=1)
    train(source)
    model = build()
    model.load_state_dict(source.local_state_dict(), same_partition_load=True)
    with pytest.raises(NotPartitionedError, match="waits for the partition"):
        model.state_dict()
    smp.step(lambda model, x: model(x))(model.eval(), torch.ones(4, WIDTH))
    assert_same(model.state_dict(), source.state_dict())


def case_another_partition_is_named() -> None:
    source = build()
    train(source)
    model = build(second=("b", "norm", "counter", "a", "c"))
    train(model)
    expected = (
        r"rank 1: a.weight belongs on this rank and is not"
        if smp.pp_rank()
        else r"rank 0: a.weight is in the state and belongs on another"
    )
    with pytest.raises(CheckpointError, match=expected):
        model.load_state_dict(source.local_state_dict(), same_partition_load=True)


def case_keys_that_do_not_fit_are_named_on_every_rank() -> None:
    model = build()
    train(model)
    state = dict(model.state_dict())
    del state["b.weight"]
    state["more"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"(?s)Unexpected.*'more'.*Missing.*'b.weight'"):
        model.load_state_dict(state)
    keys = model.load_state_dict(state, strict=False)
    assert keys.missing_keys == ["b.weight"]
    assert keys.unexpected_keys == ["more"]


def case_a_part_needs_the_partition() -> None:
    model = build()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for call in (
        model.local_state_dict,
        optimizer.local_state_dict,
        lambda: list(model.local_parameters()),
    ):
        with pytest.raises(RuntimeError, match="first call of a step function"):
            call()


def case_cpu_gathers_everything() -> None:
    model = build()
    train(model)
    model.get_module().counter.unsaved.fill_(3 * smp.pp_rank())
    expected = model.state_dict()
    assert model.cpu() is model
    net = model.get_module()
    assert net.c.weight is net.a.weight
    assert net.counter.unsaved.item() == 3
    assert_same(net.state_dict(), expected)
    assert net.eval()(torch.ones(2, WIDTH, device="cpu")).isfinite().all()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "Adafactor": torch.optim.Adafactor,
}


def case_optimizers() -> None:
    for number, make in enumerate(OPTIMIZERS.values()):
        for second in (SECOND, ()) if number == 0 else (SECOND,):  # the second rank has nothing
            model = build(second)
            net = copy.deepcopy(model.get_module())
            optimizer = smp.DistributedOptimizer(make(model.parameters()))
            plain = make(net.parameters())
            plain_train(net, plain, 2)
            train(model, optimizer, 2)
            assert second or smp.pp_rank() == 0 or not optimizer.local_state_dict()["state"]
            state = optimizer.state_dict()
            torch.testing.assert_close(state, plain.state_dict(), check_device=False)
            make(net.parameters()).load_state_dict(state)
            # Whole and partial state, before and after the partition, under another partition.
            whole, part = model.state_dict(), optimizer.local_state_dict()
            ways = list(itertools.product((state, part), (True, False)))
            # One optimizer tries all of them; each way is tried with several.
            for given, early in ways if number == 0 else [ways[number % len(ways)]]:
                other = build(("a", "c"), seed=2)
                restored = smp.DistributedOptimizer(make(other.parameters()))
                if not early:
                    train(other, restored)
                other.load_state_dict(whole)
                restored.load_state_dict(given)
                if early:
                    with pytest.raises(NotPartitionedError, match="waits"):
                        restored.state_dict()
                    with torch.no_grad():
                        smp.step(lambda model, x: model(x))(other.eval(), torch.ones(4, WIDTH))
                torch.testing.assert_close(restored.state_dict(), state, atol=0, rtol=0)


def case_optimizer_of_local_parameters() -> None:
    model = build()
    train(model)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(list(model.local_parameters())))
    train(model, optimizer, 2)
    every = smp.DistributedOptimizer(torch.optim.Adam(model.parameters()))
    every.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(every.state_dict(), optimizer.state_dict(), atol=0, rtol=0)
    part = optimizer.local_state_dict()
    optimizer.load_state_dict(part)
    assert optimizer.local_state_dict()["state"].keys() == part["state"].keys()


def case_settings_changed_after_loading_stay() -> None:
    model = build()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.7
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.7
    optimizer.param_groups[0]["lr"] = 0.3
    train(model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.3


def case_duplicate_parameters_are_named() -> None:
    model = build()
    twice = [*model.parameters(), model.get_module().b.weight]
    with pytest.warns(UserWarning, match="duplicate"):
        plain = torch.optim.SGD(twice, lr=0.1)
    with pytest.raises(ValueError, match=r"parameter b\.weight is in the optimizer twice"):
        smp.DistributedOptimizer(plain)


def files(folder: str) -> None:
    own = {"rank": smp.pp_rank(), "tensor": torch.ones(2)}
    smp.save(own, f"{folder}/own", partial=True)
    smp.save(own, f"{folder}/three", v3=True)
    smp.save(Path("x"), f"{folder}/class", True, pickle, 4)
    if smp.rank() == 0:
        smp.save(own, f"{folder}/whole", partial=False)
    smp.barrier()
    found = {path.name for path in Path(folder).iterdir()}
    assert {"own_0", "own_1", "three_0_0_0", "three_1_0_0", "whole"} <= found
    assert smp.load(f"{folder}/own")["rank"] == smp.pp_rank()
    assert smp.load(f"{folder}/three", "cpu", partial=True, back_compat=True)["rank"] == smp.rank()
    assert smp.load(f"{folder}/whole", partial=False, mmap=True)["rank"] == 0
    with pytest.raises(Exception, match="weights_only"):
        smp.load(f"{folder}/class")
    assert smp.load(f"{folder}/class", weights_only=False) == Path("x")
    arguments = {"weights_only": False}
    assert smp.load(f"{folder}/class", pickle_load_args=arguments) == Path("x")
    smp.barrier()
    (Path(folder) / f"own_{smp.rank()}").unlink()
    smp.barrier()
    (Path(folder) / "own_2_0_0").touch()
    expected = r"no file own_\d .*it has own_2_0_0, as of pipeline_parallel_degree 3 and"
    with pytest.raises(CheckpointError, match=expected):
        smp.load(f"{folder}/own")
    for call in (lambda: smp.save(1, Path("x")), lambda: smp.load(Path("x"))):
        with pytest.raises(TypeError, match="as a str"):
            call()
    with pytest.raises(FileNotFoundError, match=re.escape(f"{folder}/none does not exist")):
        smp.save(1, f"{folder}/none/x")


@pytest.mark.parametrize("case", cases_of(globals()))
def test_case(worlds: Worlds, case: str) -> None:
    run(worlds, manual_pipeline(2, microbatches=2), cases_of(globals())[case])


def test_files(worlds: Worlds, tmp_path: Path) -> None:
    run(worlds, manual_pipeline(2, microbatches=2), files, str(tmp_path))


def come_alone() -> str:
    smp.init({**CONFIG, "communication_timeout": 3})
    compute_here()
    model = build()
    train(model)
    message = ""
    if smp.rank() == 0:
        with pytest.raises(CommError) as raised:
            model.state_dict()
        message = str(raised.value)
    return message


def test_an_incomplete_set_of_ranks_is_an_error() -> None:
    message, _ = run_fresh(2, come_alone)
    assert "rank 1" in message
    assert "allgather" in message
