"""PyTorch: what of a model is local, and its state."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.cases.torch.model import SPLIT, trained
from conformance.registry import torch_case

_LOCAL = ("parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules")


def _local_rows() -> tuple[str, ...]:
    return tuple(f"smp.DistributedModel.local_{name}" for name in _LOCAL)


@torch_case(*_local_rows(), "smp.DistributedModel.local_state_dict", worlds=SPLIT)
def what_is_local_needs_the_partition(adapter: Any) -> None:
    model = adapter.model()
    for name in (*_LOCAL, "state_dict"):
        with pytest.raises(RuntimeError, match="first call of a step"):
            list(getattr(model, f"local_{name}")())


def names_of(adapter: Any, model: Any, what: str) -> list[list[str]]:
    own = [name for name, _ in getattr(model, f"local_named_{what}")()]
    found: list[list[str]] = adapter.smp.allgather(own, adapter.smp.PP_GROUP)
    return found


@torch_case(*_local_rows(), worlds=("alone", *SPLIT))
def everything_is_local_to_one_rank_of_a_pipeline(adapter: Any) -> None:
    model, _ = trained(adapter)
    plain = adapter.net()
    names = [name for names in names_of(adapter, model, "parameters") for name in names]
    assert sorted(names) == sorted(name for name, _ in plain.named_parameters())
    # Buffers of a module that is split are on every rank that has a part of it.
    buffers = {name for names in names_of(adapter, model, "buffers") for name in names}
    assert buffers == {name for name, _ in plain.named_buffers()}
    for what in ("parameters", "buffers"):
        unnamed = list(getattr(model, f"local_{what}")())
        named = [each for _, each in getattr(model, f"local_named_{what}")()]
        assert all(one is other for one, other in zip(unnamed, named, strict=True))
    modules = {name for names in names_of(adapter, model, "modules") for name in names}
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


@torch_case(
    "smp.DistributedModel.state_dict(gather_to_rank0)",
    "smp.DistributedModel.state_dict",
    "compat.state_dict_keywords",
    worlds=SPLIT,
)
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


@torch_case(
    "smp.DistributedModel.load_state_dict(same_partition_load)",
    "smp.DistributedModel.load_state_dict",
    "compat.state_dict_keywords",
    worlds=SPLIT,
)
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


@torch_case(
    "smp.DistributedModel.load_state_dict(strict)",
    "smp.DistributedModel.load_state_dict",
    worlds=("alone", "pipeline"),
)
def keys_that_do_not_fit_are_torch_s_errors(adapter: Any) -> None:
    model, _ = trained(adapter)
    state = dict(adapter.net().state_dict())
    state["other"] = state.pop("layers.0.weight")
    for told in (r"Missing key.*layers\.0\.weight", "Unexpected key.*other"):
        with pytest.raises(RuntimeError, match=told):
            model.load_state_dict(state)
    model.load_state_dict(state, strict=False)
