"""Which modules count as linear maps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smdistributed.modelparallel.torch.nn.built_in import built_in
from smdistributed.modelparallel.torch.tensor_parallel.auto.maps import is_linear, is_map


class Product(nn.Linear):
    """As Falcon writes it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        made = input @ self.weight.T
        return made if self.bias is None else made + self.bias


class Other(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 1.0001


class Clamped(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.clamp(-50, 50))


class ScaledBackward(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        made = super().forward(input)
        return made.detach() + 0.5 * (made - made.detach())


class WithMore(nn.Linear):
    """Has what a slice would not."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.scale = 1.0


class Failing(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


@pytest.mark.parametrize("kind", [nn.Linear, Product])
def test_what_computes_a_linear_map_counts_as_one(kind: type[nn.Linear]) -> None:
    before = torch.get_rng_state()
    module = nn.utils.skip_init(kind, 3, 4)
    assert is_linear(module)
    assert is_map(module)
    assert built_in(module) is not None
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", [Other, Clamped, ScaledBackward, WithMore, Failing])
def test_what_computes_something_else_does_not(kind: type[nn.Linear]) -> None:
    module = kind(3, 4)
    assert not is_linear(module)
    assert not is_map(module)
    assert built_in(module) is None


def test_the_output_map_of_an_attention_of_torch_is_its_own() -> None:
    assert not is_linear(nn.MultiheadAttention(4, 2).out_proj)
