"""The fine-tuning example: any number of processes, any launcher, a result for Transformers."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from running import EXAMPLES, run, run_by_torchrun, run_copies
from safetensors.torch import load_file

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(280)]
SCRIPT = "torch/fine_tune.py"
SMALL = ("--steps", "6", "--batch", "8", "--length", "16")


def losses(printed: str) -> list[float]:
    return [float(each) for each in re.findall(r"loss (\S+)", printed)]


def names_and_shapes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: each.shape for name, each in tensors.items()}


def test_two_partitions_train_and_save_what_transformers_reads(tmp_path: Path) -> None:
    found = losses(run_copies(SCRIPT, 2, *SMALL, "--folder", str(tmp_path)))
    assert len(found) == 6
    assert found[-1] < found[0]
    before, after = (load_file(tmp_path / it / "model.safetensors") for it in ("base", "output"))
    assert names_and_shapes(after) == names_and_shapes(before)
    assert not any(torch.equal(before[name].bfloat16(), after[name]) for name in before)
    assert (tmp_path / "output" / "tokenizer.json").exists()


def test_adapters_alone_train_and_are_saved(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    options = (*SMALL, "--folder", str(tmp_path), "--lora", "4")
    found = losses(run_copies(SCRIPT, 2, *options))
    assert found[-1] < found[0]
    adapters = load_file(tmp_path / "output" / "adapter_model.safetensors")
    # Two for each of the seven linear maps of each of the four layers.
    assert len(adapters) == 2 * 7 * 4
    assert all(".lora_A." in name or ".lora_B." in name for name in adapters)
    assert all(each.any() for name, each in adapters.items() if ".lora_B." in name)
    assert not (tmp_path / "output" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--lora", "4")], ids=["all", "adapters"])
def test_the_same_losses_with_any_processes_launcher_and_split(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    def losses_of(run: Callable[..., str], processes: int, *more: str) -> list[float]:
        folder = tmp_path / "_".join((run.__name__, str(processes), *more))
        return losses(run(SCRIPT, processes, *SMALL, *options, *more, "--folder", str(folder)))

    alone, two = losses_of(run, 1), losses_of(run, 2)
    # Sums of gradients in bf16 have another order; microbatches of replicas are half as large.
    assert two == pytest.approx(alone, abs=1e-3)
    assert losses_of(run_by_torchrun, 2) == two
    assert losses_of(run, 4) == pytest.approx(alone, abs=1e-2)
    for split in ("slices", "shards"):
        assert losses_of(run, 2, "--split", split) == pytest.approx(alone, abs=1e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of peft
@pytest.mark.parametrize("split", ["layers", "slices", "shards"])
@pytest.mark.parametrize("lora", [False, True], ids=["all", "adapters"])
def test_what_is_saved_has_the_perplexity_that_was_printed(
    tmp_path: Path, split: str, lora: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    longer = ("--length", "64", "--steps", "20", "--split", split)
    adapters = ("--lora", "4", "--learning-rate", "1e-2") if lora else ()
    printed = run(SCRIPT, 2, *SMALL, "--folder", str(tmp_path), *longer, *adapters)
    (told,) = map(float, re.findall(r"perplexity (\S+)", printed))
    base, output = tmp_path / "base", tmp_path / "output"
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    model = transformers.AutoModelForCausalLM.from_pretrained(base if lora else output)
    if lora:
        peft = pytest.importorskip("peft")
        model = peft.PeftModel.from_pretrained(model, output)
    rows = runpy.run_path(str(EXAMPLES / SCRIPT))["sequences"](tokenizer, 64)[:32]
    with torch.no_grad():
        found = model.eval()(input_ids=rows, labels=rows).loss.exp().item()
    assert found == pytest.approx(told, rel=0.01)
