"""PyTorch: saved state, by files and checkpoints."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from conformance.cases.torch.model import trained
from conformance.cases.torch.training import after_steps, optimizer_of, plain_steps
from conformance.registry import torch_case


def shared_folder(adapter: Any) -> str:
    """Returns a new folder, the same on every rank."""
    folder = tempfile.mkdtemp(prefix="conformance-") if adapter.smp.rank() == 0 else None
    found: str = adapter.smp.allgather(folder, adapter.smp.WORLD)[0]
    return found


@torch_case(
    "smp.load(partial)",
    "smp.save(partial)",
    "smp.save",
    "smp.load",
    "compat.save_and_load_names",
    worlds=("pipeline",),
)
def partial_files_are_named_by_rank(adapter: Any) -> None:
    smp = adapter.smp
    path = f"{shared_folder(adapter)}/part.pt"
    smp.save({"rank": smp.rank()}, path, partial=True)
    smp.barrier()
    assert Path(f"{path}_{smp.mp_rank()}").exists()
    assert smp.load(path, partial=True) == {"rank": smp.rank()}
    assert smp.load(path, partial=True, back_compat=True) == {"rank": smp.rank()}


@torch_case(
    "smp.load(partial)", "smp.save(partial)", "smp.save", "smp.load", worlds=("alone", "pipeline")
)
def one_file_is_for_everyone(adapter: Any) -> None:
    import torch

    smp = adapter.smp
    path = f"{shared_folder(adapter)}/whole.pt"
    if smp.rank() == 0:
        smp.save({"number": 3}, path, partial=False)
    smp.barrier()
    assert smp.load(path, partial=False) == {"number": 3}
    assert torch.load(path) == {"number": 3}
    with pytest.raises(TypeError, match="str"):
        smp.save({}, Path(path))
    with pytest.raises((OSError, RuntimeError), match="nowhere"):
        smp.save({}, f"{path}.nowhere/file", partial=False)


@torch_case("torch.in_use.smp_save_v", "compat.save_and_load_names", worlds=("both",))
def three_ranks_in_a_name_on_request(adapter: Any) -> None:
    smp = adapter.smp
    path = f"{shared_folder(adapter)}/part.pt"
    smp.save({"rank": smp.rank()}, path, partial=True, v3=True)
    smp.barrier()
    assert Path(f"{path}_{smp.pp_rank()}_{smp.tp_rank()}_{smp.rdp_rank()}").exists()
    assert smp.load(path, partial=True) == {"rank": smp.rank()}


@torch_case(
    "smp.resume_from_checkpoint(partial)",
    "smp.save_checkpoint(user_content)",
    "smp.save_checkpoint(partial)",
    "smp.save_checkpoint",
    "smp.resume_from_checkpoint",
    "torch.in_use.smp_save_checkpoint_callers",
    worlds=("alone", "pipeline", "both"),
)
def training_resumes_from_a_partial_checkpoint(adapter: Any) -> None:
    import torch

    smp, folder = adapter.smp, shared_folder(adapter)
    model, optimizer = after_steps(adapter, 2)
    options = {"model": model, "optimizer": optimizer, "user_content": {"step": 2}}
    smp.save_checkpoint(folder, tag="two", partial=True, **options)
    assert Path(folder, "two_partial").is_dir()
    assert "two" in Path(folder, "newest").read_text()
    after_steps(adapter, 2, model, optimizer)
    wanted = {name: each.detach().clone() for name, each in model.local_named_parameters()}
    del model, optimizer, options
    import gc

    gc.collect()
    model = adapter.model()
    optimizer = optimizer_of(adapter, model)
    assert smp.resume_from_checkpoint(folder) == {"step": 2}
    after_steps(adapter, 2, model, optimizer)
    for name, parameter in model.local_named_parameters():
        assert torch.equal(parameter.detach(), wanted[name]), name


@torch_case(
    "smp.resume_from_checkpoint(partial)",
    "smp.save_checkpoint(partial)",
    "smp.save_checkpoint",
    "smp.resume_from_checkpoint",
    worlds=("alone", "pipeline"),
)
def a_full_checkpoint_is_one_plain_file(adapter: Any) -> None:
    import torch

    smp, folder = adapter.smp, shared_folder(adapter)
    model, _ = after_steps(adapter, 2)
    smp.save_checkpoint(folder, tag="all.pt", partial=False, model=model, user_content=5)
    state = torch.load(f"{folder}/all.pt", weights_only=True)
    net = adapter.net()
    net.load_state_dict(state)
    plain = dict(plain_steps(adapter, 2)[0].named_parameters())
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(parameter, plain[name], atol=1e-5, rtol=0)
    assert Path(folder, "user_content_all.pt").exists()
    del model
    import gc

    gc.collect()
    model = adapter.model()
    assert smp.resume_from_checkpoint(folder, tag="all.pt", partial=False) == 5
    trained(adapter, model)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.detach().cpu(), state[name].cpu())


@torch_case(
    "smp.save_checkpoint(num_kept_partial_checkpoints)", "smp.save_checkpoint", worlds=("pipeline",)
)
def old_partial_checkpoints_are_removed(adapter: Any) -> None:
    smp, folder = adapter.smp, shared_folder(adapter)
    model, optimizer = after_steps(adapter, 1)
    for step in range(4):
        smp.save_checkpoint(
            folder, f"s{step}", model=model, optimizer=optimizer, num_kept_partial_checkpoints=2
        )
    kept = sorted(each.name for each in Path(folder).iterdir() if each.name.endswith("_partial"))
    assert kept == ["s2_partial", "s3_partial"]
    with pytest.raises(ValueError, match="num_kept_partial_checkpoints"):
        smp.save_checkpoint(folder, "s9", model=model, num_kept_partial_checkpoints=0)


@torch_case("smp.save_checkpoint", worlds=("pipeline",))
def tags_agree_over_ranks(adapter: Any) -> None:
    smp, folder = adapter.smp, shared_folder(adapter)
    model, _ = after_steps(adapter, 1)
    with pytest.raises(Exception, match=r"(?s)t0.*t1"):
        smp.save_checkpoint(folder, tag=f"t{smp.rank()}", model=model)


@torch_case("smp.save_checkpoint", "smp.resume_from_checkpoint", worlds=("pipeline",))
def checkpoints_are_of_wrapped_models_and_there(adapter: Any) -> None:
    smp, folder = adapter.smp, shared_folder(adapter)
    model, optimizer = after_steps(adapter, 1)
    with pytest.raises(TypeError, match=r"smp\.DistributedModel"):
        smp.save_checkpoint(folder, "x", model=model.get_module())
    with pytest.raises(TypeError, match=r"smp\.DistributedOptimizer"):
        smp.save_checkpoint(folder, "x", model=model, optimizer=optimizer.optimizer)
    smp.save_checkpoint(folder, "there", model=model)
    with pytest.raises(Exception, match="there"):
        smp.resume_from_checkpoint(folder, tag="not_there")


@torch_case(
    "torch.in_use.smp_resume_from_checkpoint_on_an_untouched_plain_torch_save_file",
    worlds=("pipeline",),
)
def a_plain_file_is_a_full_checkpoint(adapter: Any) -> None:
    import torch

    smp, folder = adapter.smp, shared_folder(adapter)
    state = {name: tensor + 1 for name, tensor in adapter.net().state_dict().items()}
    if smp.rank() == 0:
        torch.save(state, f"{folder}/fullmodel.pt")
    smp.barrier()
    model = adapter.model()
    assert smp.resume_from_checkpoint(folder, tag="fullmodel.pt", partial=False) is None
    trained(adapter, model)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.detach().cpu(), state[name])


@torch_case("smp.save_checkpoint", worlds=("alone", "pipeline"))
def a_tag_that_is_saved_again_takes_the_place_of_the_former(adapter: Any) -> None:
    smp, folder = adapter.smp, shared_folder(adapter)
    model, _ = after_steps(adapter, 1)
    for number in range(2):
        smp.save_checkpoint(folder, tag="one", model=model, user_content=number)
    smp.barrier()
    names = {each.name for each in Path(folder).iterdir()}
    assert names == {"one_partial", "newest"}
    assert smp.resume_from_checkpoint(folder) == 1


class Unknown:
    """A class that no file may bring along."""


@torch_case(
    "smp.resume_from_checkpoint(partial)", "smp.resume_from_checkpoint", worlds=("pipeline",)
)
def classes_that_a_file_brings_are_refused_by_name(adapter: Any) -> None:
    import torch

    smp, folder = adapter.smp, shared_folder(adapter)
    if smp.rank() == 0:
        torch.save({"layers.0.weight": Unknown(), "size": torch.Size([3])}, f"{folder}/strange.pt")
    smp.barrier()
    model = adapter.model()
    trained(adapter, model)
    with pytest.raises(Exception, match=r"Unknown") as error:
        smp.resume_from_checkpoint(folder, tag="strange.pt", partial=False)
    assert "torch.Size" not in str(error.value)


@torch_case("smp.save_checkpoint(partial)", "smp.save_checkpoint", worlds=("alone", "pipeline"))
def what_stands_in_the_way_of_a_checkpoint_is_named(adapter: Any) -> None:
    smp, folder = adapter.smp, shared_folder(adapter)
    model, _ = after_steps(adapter, 1)
    if smp.rank() == 0:
        Path(folder, "one_partial").write_text("not a folder")
        Path(folder, "two.pt").mkdir()
    smp.barrier()
    for tag, partial, name in (("one", True, "one_partial"), ("two.pt", False, "two.pt")):
        with pytest.raises(Exception, match=name):
            smp.save_checkpoint(folder, tag=tag, partial=partial, model=model)
    assert Path(folder, "one_partial").read_text() == "not a folder"
    assert not list(Path(folder, "two.pt").iterdir())
    # Nothing is left that would keep the next one from being written.
    smp.save_checkpoint(folder, tag="three", partial=True, model=model)
    assert "three" in Path(folder, "newest").read_text()


@torch_case("smp.DistributedModel.load_state_dict(same_partition_load)", worlds=("manual",))
def a_state_of_another_partition_is_not_loaded_as_ones_own(adapter: Any) -> None:
    model, _ = trained(adapter)
    own = model.local_state_dict()
    model.load_state_dict(own, same_partition_load=True)
    other = adapter.model()
    adapter.smp.set_partition(other.get_module().layers[0], 1 - adapter.smp.pp_size() % 2)
    for index, layer in enumerate(other.get_module().layers):
        adapter.smp.set_partition(layer, 1 if index % 2 else 0)
    trained(adapter, other)
    with pytest.raises(Exception, match=r"layers\.\d.*another partition"):
        other.load_state_dict(own, same_partition_load=True)


@torch_case(
    "smp.resume_from_checkpoint(partial)",
    "smp.save_checkpoint(partial)",
    worlds=("alone", "pipeline"),
)
def random_numbers_go_on_where_a_partial_checkpoint_was_made(adapter: Any) -> None:
    import random

    import numpy
    import torch

    def draws() -> list[float]:
        return [float(torch.rand(())), random.random(), float(numpy.random.rand())]

    smp, folder, model = adapter.smp, shared_folder(adapter), adapter.model()
    after_steps(adapter, 1, model, optimizer_of(adapter, model))
    smp.save_checkpoint(folder, tag="one", partial=True, model=model)
    wanted = draws()
    assert draws() != wanted
    smp.resume_from_checkpoint(folder)
    assert draws() == wanted
