"""PyTorch: Python state that modules share, on one partition or two: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.adapters.base import WIDTH
from conformance.cases.torch.model import SPLIT, mean_square
from conformance.registry import torch_case
from smdistributed.modelparallel.common.errors import UnsupportedError

MICROBATCHES = 4
#: What one module writes and another one reads.
BOARD: dict[str, Any] = {}


def nets() -> dict[str, Callable[[], Any]]:
    """Returns models, each with two modules that meet besides through their arguments."""
    import torch
    from torch import nn

    class Half(nn.Module):
        """Half of a model."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("level", torch.zeros(WIDTH))
            self.calls = 0
            self.gain = 1.0
            self.seen: Any = None
            self.shared: list[Any] = []

        def forward(self, x: Any) -> Any:
            self.calls += 1
            y = torch.tanh(self.linear(x)) * self.gain
            with torch.no_grad():
                self.level += y.mean(0)
            self.seen = y
            return y

    class Writing(Half):
        def forward(self, x: Any) -> Any:
            BOARD["factor"] = BOARD.get("factor", 0) + 1
            self.shared.append(float(len(self.shared)))
            return super().forward(x)

    class Reading(Half):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * BOARD.get("factor", 1) + sum(self.shared)

    class Net(nn.Module):
        kinds: tuple[Any, Any] = (Half, Half)

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.first, self.second = (kind() for kind in self.kinds)
            self.first.shared = self.second.shared

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x))

    class Tensor(Net):
        def forward(self, x: Any) -> Any:
            x = self.second(self.first(x))
            return x + self.first.seen

    class Counter(Net):
        def forward(self, x: Any) -> Any:
            x = self.first(x) * self.first.calls
            return self.second(x)

    class Buffer(Net):
        def forward(self, x: Any) -> Any:
            return self.second(self.first(x)) + self.first.level

    class Setting(Net):
        def forward(self, x: Any) -> Any:
            self.second.gain = 2.0
            return self.second(self.first(x))

    class Between(Net):
        def forward(self, x: Any) -> Any:
            x = self.first(x)
            self.first.gain = 0.5
            x = self.second(self.first(x))
            self.first.gain = 1.0
            return x

    class Global(Net):
        kinds = (Writing, Reading)

    class Nesting(Half):
        def forward(self, x: Any) -> Any:
            self.shared.append([len(self.shared)])
            for each in self.shared:
                each[0] += 1
            return super().forward(x) * len(self.shared[0])

    class Nested(Net):
        kinds = (Nesting, Nesting)

    class Counting(Half):
        total = 0

        def forward(self, x: Any) -> Any:
            type(self).total += 1
            return super().forward(x) * type(self).total

    class OfTheClass(Net):
        kinds = (Half, Counting)

        def __init__(self) -> None:
            super().__init__()
            Counting.total = 0

    class Closure(Net):
        def __init__(self) -> None:
            super().__init__()
            calls: list[int] = []

            def count(_: Any, __: Any, result: Any) -> Any:
                calls.append(1)
                return result * len(calls)

            self.second.register_forward_hook(count)

    class Told(Half):
        def forward(self, x: Any, told: Any = (1.0, {"mode": "plain"})) -> Any:
            y = super().forward(x) * told[0]
            return y if told[1]["mode"] == "plain" else -y

    class Arguments(Net):
        kinds = (Half, Told)

        told = 0

        def forward(self, x: Any) -> Any:
            self.told += 1
            mode = "plain" if self.told % 3 else "other"
            return self.second(self.first(x), [float(self.told), {"mode": mode}])

    class Facts(Net):
        def forward(self, x: Any) -> Any:
            weight = self.second.linear.weight
            x = self.first(x.to(weight.dtype).to(weight.device))
            return self.second(x) / weight.shape[0] if weight.requires_grad else x

    class Known(Net):
        def __init__(self) -> None:
            super().__init__()
            self.known = (self.first.linear.weight, self.second.linear.weight)

        def forward(self, x: Any) -> Any:
            sizes = [each.shape[0] * each.dim() * each.numel() for each in self.known]
            return self.second(self.first(x) / sizes[0]) / sizes[1]

    class Results(Half):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            return {"parts": [y, -y], "factor": 3.0, "nothing": None}

    class Structured(Net):
        kinds = (Results, Half)

        def forward(self, x: Any) -> Any:
            found = self.first(x)
            one, other = found["parts"]
            assert found["nothing"] is None
            return self.second(one * found["factor"] + other)

    class Writer(Half):
        def forward(self, x: Any) -> Any:
            x.mul_(2)
            return super().forward(x)

    class InPlace(Net):
        kinds = (Half, Writer)

        def forward(self, x: Any) -> Any:
            x = self.first(x) + 1
            return self.second(x) + x

    class Functional(Net):
        def forward(self, x: Any) -> Any:
            x = torch.nn.functional.linear(self.first(x), self.second.linear.weight)
            return self.second(x) + self.first.linear.bias

    class Table(Net):
        table: Any = None

        def forward(self, x: Any) -> Any:
            if self.table is None:
                self.table = torch.arange(float(WIDTH), device=x.device)
            return self.second(self.first(x) + self.table)

    class Memory(Net):
        kept: Any = None

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            y = self.second(x if self.kept is None else x + self.kept)
            self.kept = y.detach()
            return y

    class Turning(Half):
        def forward(self, x: Any) -> Any:
            return super().forward(x).t()

    class TurningBack(Half):
        def forward(self, x: Any) -> Any:
            return super().forward(x.t())

    class Turned(Net):
        kinds = (Turning, TurningBack)

    class Own(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
            self.register_buffer("shift", torch.linspace(-1.0, 1.0, WIDTH))

        def forward(self, x: Any) -> Any:
            x = self.first(x) * self.scale + self.shift
            return self.second(x) * self.scale.square()

    class Derived(Net):
        table: Any = None

        def forward(self, x: Any) -> Any:
            if self.table is None:
                self.table = torch.arange(float(WIDTH), device=x.device) / 2 + 1
            return self.second(self.first(x) * self.table)

    every = (
        *(Net, Tensor, Counter, Buffer, Setting, Between, Global, Nested, OfTheClass, Closure),
        *(Arguments, Facts, Structured, InPlace, Functional, Table, Memory),
        *(Turned, Own, Derived, Known),
    )
    return {kind.__name__.lower(): kind for kind in every}


def without_the_library(adapter: Any, net: Any, steps: int) -> list[Any]:
    """Returns the losses of microbatches, and the gradients, of each step."""
    found = []
    for number in range(steps):
        net.zero_grad()
        losses = []
        for part in adapter.tensor(adapter.batch(8, seed=number)).chunk(MICROBATCHES):
            loss = net(part).square().mean()
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
        found.append((losses, {name: p.grad.clone() for name, p in net.named_parameters()}))
    return found


@torch_case("torch.script_rules", worlds=("alone", *SPLIT), is_quick=False)
def state_that_modules_share_is_right_or_refused(adapter: Any) -> None:
    import torch

    refused = set()
    for name, build in nets().items():
        BOARD.clear()
        wanted = without_the_library(adapter, build().to(adapter.device), 3)
        BOARD.clear()
        net = build().to(adapter.device)
        model = adapter.smp.DistributedModel(net)
        for index, half in enumerate((net.first, net.second)):
            adapter.smp.set_partition(half, index % adapter.smp.pp_size())
        step = adapter.smp.step(mean_square)
        try:
            for number, (losses, gradients) in enumerate(wanted):
                model.zero_grad()
                output = step(model, adapter.tensor(adapter.batch(8, seed=number)))
                torch.testing.assert_close(output.outputs, losses)
                for key, parameter in model.local_named_parameters():
                    torch.testing.assert_close(parameter.grad, gradients[key])
        except UnsupportedError:
            refused.add(name)
    allowed = set()
    if adapter.smp.pp_size() > 1:
        allowed |= {"counter", "buffer", "between", "global", "nested", "oftheclass", "closure"}
        allowed |= {"memory"}
        if adapter.config.auto_partition:  # it may split a half, and a half keeps a tensor
            allowed |= {"structured", "functional", "table", "arguments"}
            allowed |= {"derived", "own", "turned", "known"}
    assert refused <= allowed, refused


@torch_case("torch.script_rules", worlds=("alone", "replicas", "pipeline"))
def what_a_step_adds_is_trained_or_refused(adapter: Any) -> None:
    import torch
    from torch import nn

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            if not hasattr(self, "third"):
                self.third = nn.Linear(WIDTH, WIDTH).to(x.device)
                self.third.load_state_dict(self.second.state_dict())
            return self.third(torch.tanh(self.second(self.first(x))))

    class Scaling(Growing):
        def forward(self, x: Any) -> Any:
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(torch.full((WIDTH,), 0.5, device=x.device))
            return self.second(self.first(x)) * self.scale

    for build in (Growing, Scaling):
        wanted = without_the_library(adapter, build().to(adapter.device), 2)
        model = adapter.smp.DistributedModel(build())
        step = adapter.smp.step(mean_square)
        try:
            for number, (losses, gradients) in enumerate(wanted):
                model.zero_grad()
                output = step(model, adapter.tensor(adapter.batch(8, seed=number)))
                torch.testing.assert_close(output.outputs, losses)
                found = {key: each.grad for key, each in model.local_named_parameters()}
                assert found.keys() == gradients.keys()
                for key, gradient in gradients.items():
                    torch.testing.assert_close(found[key], gradient)
        except UnsupportedError:
            assert adapter.smp.size() > 1
