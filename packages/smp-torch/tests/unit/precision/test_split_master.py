"""Masters that are split have the numbers of masters that are not, for everybody who looks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.precision.one_pass_adam import OnePassAdam
from smdistributed.modelparallel.torch.precision.split_master import (
    SplitMaster,
    follow,
    is_split,
    merged,
    rest_of,
    split,
    values_of,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = (40, 3)


def of_bits(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).to(DEVICE).view(torch.float32)


def test_every_number_is_what_it_was() -> None:
    generator = torch.Generator().manual_seed(1)
    upper = torch.randint(-(1 << 15), 1 << 15, (200, 1), generator=generator) << 16
    edges = [0, 1, 0x7FFE, 0x7FFF, 0x8001, 0xFFFF]
    lower = torch.cat([torch.tensor(edges), torch.randint(1 << 16, (100,), generator=generator)])
    lower = lower[lower != 0x8000]
    values = of_bits((upper + lower).flatten())
    again = merged(values.bfloat16(), rest_of(values.bfloat16(), values))
    numbers = ~values.isnan()
    assert torch.equal(again[numbers].view(torch.int32), values[numbers].view(torch.int32))
    assert again[~numbers].isnan().all()


def test_halfway_a_number_may_become_the_one_before() -> None:
    upper = torch.arange(-(1 << 15), 1 << 15) << 16
    values = of_bits(upper + 0x8000)
    values = values[values.isfinite()]
    again = merged(values.bfloat16(), rest_of(values.bfloat16(), values))
    lost = values.view(torch.int32) - again.view(torch.int32)
    # To even: one half is rounded down, and one up.
    assert set(lost.tolist()) == {0, 1}
    assert torch.equal(again.bfloat16(), values.bfloat16())


def trained(*, splits: bool, use: Callable[[Any], object] | None = None) -> tuple[list[Any], bool]:
    """Trains a parameter in bf16; returns what there is of it, and whether its master is split."""
    torch.manual_seed(3)
    source = torch.randn(SHAPE, device=DEVICE).bfloat16()
    master: Any = SplitMaster.of(source) if splits else nn.Parameter(source.float())
    optimizer = torch.optim.AdamW([master], lr=0.05, weight_decay=0.2, fused=True)
    for step in range(4):
        master.grad = torch.randn(SHAPE, device=DEVICE)
        with OnePassAdam({id(master): source}, None, smallest=16) as one_pass:
            optimizer.step()
        assert one_pass.copied == {id(master)}
        if step == 1 and use is not None:
            use(master)
            if not is_split(master):
                source.copy_(master)
    state = optimizer.state[master]
    return [source, values_of(master), state["exp_avg"], state["exp_avg_sq"]], is_split(master)


def are_equal(got: list[Any], want: list[Any]) -> bool:
    """Whether all is the same, but for masters that were halfway between two of bf16."""
    (source, master, *moments), (other, whole, *others) = got, want
    torch.testing.assert_close(master, whole, rtol=3e-7, atol=2e-7)
    return torch.equal(source, other) and all(map(torch.equal, moments, others))


def test_updates_are_those_of_whole_masters() -> None:
    (want, _), (got, stays_split) = trained(splits=False), trained(splits=True)
    assert stays_split
    assert are_equal(got, want)


#: What a script may do with a master between two updates.
USES: dict[str, Callable[[Any], object]] = {
    "norm": lambda each: each.norm(),
    "changed": lambda each: each.data.mul_(0.5),
    "changed by many": lambda each: torch._foreach_mul_([each.data], 0.5),
    "compared": lambda each: torch.equal(each, each),
    "transformed": lambda each: torch.func.vmap(torch.sum)(each),
    "added to": lambda each: each.detach().add_(1),
}


@pytest.mark.parametrize("use", USES)
def test_scripts_find_whole_masters(use: str) -> None:
    (want, _), (got, is_split_again) = (
        trained(splits=splits, use=USES[use]) for splits in (False, True)
    )
    assert is_split_again
    assert are_equal(got, want)


def test_copies_are_whole() -> None:
    for copied in (copy.deepcopy, _through_a_file):
        master = SplitMaster.of(torch.randn(SHAPE, device=DEVICE).bfloat16())
        want = values_of(master)
        assert torch.equal(copied(master), want)


def _through_a_file(tensor: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save({"tensor": tensor.detach()}, file)
    file.seek(0)
    return torch.load(file)["tensor"]


@pytest.mark.parametrize("is_whole", [False, True])
def test_it_follows_what_it_is_a_master_of(is_whole: bool) -> None:
    source = torch.randn(SHAPE, device=DEVICE).bfloat16()
    master = SplitMaster.of(source)
    with torch.no_grad():
        master.add_(1e-4) if is_whole else None
        source.mul_(2)
        follow(master)
    assert is_split(master) is not is_whole
    assert torch.equal(values_of(master), source.float())
    split(master)
    assert is_split(master)


def test_it_has_little_memory() -> None:
    master = SplitMaster.of(torch.zeros(SHAPE, dtype=torch.bfloat16, device=DEVICE))
    assert master.rest is not None
    assert master.rest.nbytes == 2 * master.numel()
    facts = (master.shape, master.dtype, master.stride(), master.is_leaf, master.requires_grad)
    assert facts == (torch.Size(SHAPE), torch.float32, (3, 1), True, True)
    assert torch.zeros_like(master).shape == master.shape
    assert is_split(master)
