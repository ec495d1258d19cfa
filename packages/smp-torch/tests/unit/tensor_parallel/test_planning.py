"""Modules are groups where every form of their calls that is known can be proven."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import Call
from smdistributed.modelparallel.torch.tensor_parallel.auto.capture import with_padding
from smdistributed.modelparallel.torch.tensor_parallel.auto.search import Search
from smdistributed.modelparallel.torch.tensor_parallel.auto.trial_slices import Pretended

WIDTH, HEADS, LENGTH = 16, 4, 6


class Checking(nn.Module):
    """Attention that looks at the size of its mask by its number of heads, as ProphetNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        heads = [
            each(x).view(*x.shape[:-1], self.num_heads, 4).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        ]
        if mask is not None and mask.shape[1] != self.num_heads:
            raise ValueError("a mask for other heads")
        seen = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        return self.out(seen.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("heads", [HEADS, None])
def test_a_plan_holds_for_both_forms_of_calls(heads: int | None) -> None:
    module = Checking()
    x = torch.empty(2, LENGTH, WIDTH)
    others: dict[nn.Module, Call] = {}
    if heads is not None:
        others[module] = Call(((x, torch.empty(2, heads, 1, LENGTH)), {}))
    search = Search(
        Pretended(2, 0),
        lambda each: each,
        {module: "it"},
        {module: Call(((x,), {}))},
        (),
        (),
        others,
    )
    search.try_one(module, closes=True)
    found = search.plan.groups[module]
    # With the heads divided a mask for all of them is refused; with sizes that are cut it is not.
    assert bool(found.plan.divided) is (heads is None)
    assert len(found.proofs) == 1 + (heads is not None)


def test_models_that_take_masks_are_tried_with_padding() -> None:
    class Model(nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
            return input_ids

    ids = torch.ones(2, 3, dtype=torch.int64)
    padded = with_padding(Model(), {"input_ids": ids})
    assert padded["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert with_padding(nn.Linear(2, 2), {"input_ids": ids}) == {}
    assert with_padding(Model(), {"pixel_values": ids}) == {}


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


def test_what_groups_have_split_is_not_left_whole_around_them() -> None:
    module = nn.Sequential(Added(), nn.Linear(WIDTH, 2 * WIDTH))
    call = Call(((torch.empty(2, LENGTH, WIDTH),), {}))
    names: dict[nn.Module, str] = {module[0]: "0", module: ""}
    calls = dict.fromkeys(names, call)
    search = Search(Pretended(2, 0), lambda each: each, names, calls)
    for each in names:
        search.try_one(each, closes=True)
    assert list(search.plan.groups) == [module[0]]
