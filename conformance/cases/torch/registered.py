"""PyTorch: the user's own distributed modules, and what those of the library refuse."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.adapters.base import WIDTH
from conformance.cases.torch.tensor_parallel import LM, SIZES, examples
from conformance.registry import torch_case


@torch_case(
    "smp.tp_register", "smp.tp_register_with_module", "smp.nn.DistributedModule", worlds=("slices",)
)
def registered_classes_are_replaced_by_the_user_s(adapter: Any) -> None:
    import torch
    from torch import nn

    smp = adapter.smp

    class Doubled(smp.nn.DistributedModule):  # type: ignore[misc]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = smp.nn.DistributedLinear(width, width)

        def forward(self, x: Any, factor: float) -> Any:
            return self.inner(x) * factor

    class Original(nn.Module):
        def __init__(self, width: int, unused: int = 3) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width)

        def forward(self, x: Any) -> Any:
            return {"out": self.inner(x) * 2}

    class Other(Original):
        pass

    hooks: dict[str, Any] = {
        "init_hook": lambda width, unused=3: ([width], {}),
        "forward_hook": lambda x: ((x,), {"factor": 2.0}),
        "return_hook": lambda result: {"out": result},
    }
    smp.tp_register(Doubled, **hooks)(Original)
    smp.tp_register_with_module(Other, Doubled, **hooks)
    x = examples(adapter, smp.tp_rank())
    for kind in (Original, Other):
        torch.manual_seed(3)
        with smp.tensor_parallelism():
            original = kind(WIDTH)
        wanted = original.to(adapter.device)(x)["out"]
        model = smp.DistributedModel(original.cpu())
        assert isinstance(model.get_module(), Doubled)
        torch.testing.assert_close(model(x)["out"], wanted, rtol=1e-4, atol=1e-5)
    for name, wrong in (
        ("init_hook", lambda size: ((), {})),
        ("forward_hook", lambda y: ((y,), {})),
    ):
        with pytest.raises(TypeError, match="signature of the original"):
            smp.tp_register(Doubled, **{name: wrong})(Original)


@torch_case(
    "smp.nn.DistributedAttentionLayer", "smp.nn.DistributedTransformerLMHead", worlds=("slices",)
)
def inputs_that_do_not_fit_are_refused_by_their_rule(adapter: Any) -> None:
    import torch

    nn = adapter.smp.nn
    attention = nn.DistributedAttentionLayer(**SIZES, causal_mask_size=4).to(adapter.device)
    hidden = torch.zeros(1, 5, SIZES["hidden_size"], device=adapter.device)
    with pytest.raises(ValueError, match="causal_mask_size"):
        attention((hidden, None))
    head = nn.DistributedTransformerLMHead(**LM).to(adapter.device)
    ids = torch.zeros(1, 4, dtype=torch.long, device=adapter.device)
    with pytest.raises(ValueError, match="num_token_types is 0"):
        head((ids, None, ids, None, None))
    with pytest.raises(ValueError, match="num_positions"):
        head((torch.zeros(1, 9, dtype=torch.long, device=adapter.device), *4 * (None,)))
    with pytest.raises(ValueError, match="intermediate_size"):
        nn.DistributedTransformerOutputLayer(SIZES["hidden_size"], intermediate_size=7)
