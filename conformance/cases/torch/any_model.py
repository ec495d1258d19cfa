"""PyTorch: models that nobody wrote a map for, split by ``auto=True``: beyond the documents."""

from __future__ import annotations

from typing import Any

from conformance.adapters.base import WIDTH
from conformance.cases.torch.partition import log_of
from conformance.cases.torch.tensor_parallel import BOTH, LENGTH, examples
from conformance.registry import torch_case

HEADS = 2


def _model() -> Any:
    """Returns blocks with fused maps, torch's attention, and one that slices cannot compute."""
    from torch import nn
    from torch.nn import functional as F

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = HEADS
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            parts = self.qkv(x).reshape(*x.shape[:2], 3, self.num_heads, WIDTH // HEADS)
            seen = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4).unbind(0))
            return self.out(seen.transpose(1, 2).flatten(2))

    class FeedForward(nn.Module):
        def __init__(self, between: nn.Module) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
            self.between = between

        def forward(self, x: Any) -> Any:
            return self.down(self.between(self.up(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fused, self.feed_forward = Fused(), FeedForward(nn.GELU())
            self.torchs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.ranked = FeedForward(nn.Softmax(-1))  # over all channels

        def forward(self, x: Any) -> Any:
            x = x + self.feed_forward(x + self.fused(x))
            return self.ranked(x + self.torchs(x, x, x, need_weights=False)[0])

    return Model()


@torch_case("tp.auto", worlds=BOTH)
def blocks_of_any_model_are_split(adapter: Any) -> None:
    import torch

    smp = adapter.smp
    torch.manual_seed(10 + smp.tp_rank())  # the values are those that the first rank draws
    sample = torch.zeros(2, LENGTH, WIDTH, device=adapter.device)
    with smp.tensor_parallelism(auto=True, sample_inputs=(sample,)):
        module = _model()
    with log_of() as log:
        model = smp.DistributedModel(module)
    assert "ranked is no group for tensor parallelism" in log.getvalue()
    torch.manual_seed(10)
    whole = _model().to(adapter.device)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    plain = torch.optim.SGD(whole.parameters(), lr=1.0)
    losses = [whole(examples(adapter, rank)).square().mean() for rank in range(smp.dp_size())]
    torch.stack(losses).mean().backward()

    @smp.step
    def step(model: Any, given: Any) -> Any:
        loss = model(given).square().mean()
        model.backward(loss)
        return loss

    found = step(model, examples(adapter, smp.dp_rank())).reduce_mean()
    torch.testing.assert_close(found, losses[smp.dp_rank()].detach(), rtol=1e-5, atol=1e-6)
    state = model.state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(state[name].to(value.device), value), name
    local = model.local_state_dict()
    shapes = {name: tuple(local[name].shape) for name, _ in model.local_named_parameters()}
    assert shapes.get("fused.qkv.weight") in (None, (3 * WIDTH // 2, WIDTH))
    assert shapes.get("torchs.in_proj_weight") in (None, (3 * WIDTH // 2, WIDTH))
    assert shapes.get("feed_forward.up.weight") in (None, (4, WIDTH))
    # An update of this size is the whole gradient, wherever its slices are.
    optimizer.step()
    plain.step()
    state = model.state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(
            state[name].to(value.device), value, rtol=1e-5, atol=1e-6, msg=name
        )
