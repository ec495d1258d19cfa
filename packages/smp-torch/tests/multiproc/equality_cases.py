"""Steps that must give the numbers of one process, whatever the partition.

Long, since it is one list of cases that share their nets.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from reference import (
    MICROBATCHES,
    assert_is_split,
    assert_same_gradients,
    assert_same_results,
    compare,
    empty,
    own_share,
    run_plain,
    split,
)
from torch import nn
from torch.nn import functional as F

import smdistributed.modelparallel.torch as smp

WIDTH = 16


def mlp(depth: int = 6) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def batch(size: int = 8) -> list[torch.Tensor]:
    size *= smp.dp_size()
    return [torch.randn(size, WIDTH), torch.randn(size, WIDTH)]


def regress(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(model(x), y)
    model.backward(loss)
    return loss


def case_mlp() -> None:
    compare(mlp, regress, [batch(), batch()])


class TwoBranches(nn.Module):
    """A residual stream alone lies between its branches; the second has four times the work."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> Any:
        x = x + torch.tanh(self.mixes(x))
        return x + self.inner(x)


def case_blocks_that_a_v_cuts() -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*(TwoBranches() for _ in range(9)))

    model = compare(make, regress, [batch(), batch()])
    if smp.state.cfg.pipeline == "zero_bubble_v" and smp.pp_size() == 4:
        split = model.holder.placement.assignment.containers
        assert set(split) > {""}, "nothing is cut: the case does not try what it is for"


def case_result_and_loss_are_returned() -> None:
    def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = model(x)
        loss = F.mse_loss(out, y)
        model.backward(loss)
        return {"loss": loss, "nested": [out, (out.mean(),)]}

    compare(mlp, body, [batch()])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.mlp(self.norm(x))


class Tied(nn.Module):
    """Embedding and head share a parameter, so the last partition is the first: 0 -> 1 -> 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.groups = nn.ModuleList(
            nn.ModuleList(Block() for _ in range(2)) for _ in range(max(2, smp.pp_size()))
        )
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("offset", torch.rand(WIDTH))

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens) * self.scale + self.offset
        for group in self.groups:
            for block in group.children():
                x = block(x)
        return self.head(x)


def predict_tokens(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    model.backward(loss)
    return loss


def case_tied_embedding_and_container_tensors() -> None:
    batches = [[torch.randint(11, (8 * smp.dp_size(), 6))] for _ in range(2)]
    model = compare(Tied, predict_tokens, batches)
    if smp.pp_size() > 1:
        partition = model.holder.partition_by_name()
        assert partition["embedding"] == partition["head"]


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> Any:
        first = torch.tanh(self.layers[0](x))
        h = first
        for layer in self.layers[1:]:
            h = torch.tanh(layer(h)) + first * 0.5
        # The first layer once more, after the last: a module in use on both ends.
        return self.layers[0](h) + self.layers[3](first) + x


def case_skip_connections_and_reuse() -> None:
    compare(Skips, regress, [batch(), batch()])


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> Any:
        h = x * 1.0
        total = self.layers[0](h) * 0.5
        for layer in self.layers:
            h = layer(h)
            total.add_(h)  # made on one partition, changed on others
            h += 0.25
            h.mul_(1.5)
            h[:, :3] = h[:, 3:6].detach() * 2
            F.relu(h, inplace=True)
        return h + total


def case_in_place_glue() -> None:
    compare(InPlace, regress, [batch(), batch()])


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # scripting is deprecated, and libraries do it

    @torch.jit.script
    def positions(like: torch.Tensor) -> torch.Tensor:
        size = like.shape[-1]
        return torch.arange(size, device=like.device) / size


class Scripted(nn.Module):
    """Makes a tensor by a call that no override sees, and its layers use it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = positions(x)
        x = self.first(x)
        for layer in self.layers:
            x = layer(x + near.unsqueeze(0))
        return x


def case_a_module_that_calls_scripted_functions() -> None:
    compare(lambda: nn.Sequential(Scripted(), *mlp(1)), regress, [batch(), batch()])


@dataclass
class Pair:
    hidden: torch.Tensor
    extra: torch.Tensor | None
    label: str = "pair"


class Splitter(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, extra: torch.Tensor | None = None) -> Any:
        h = torch.tanh(self.linear(x)) + (0 if extra is None else extra)
        if self.kind == "dict":
            return {"hidden": h, "extra": h * 2, "none": None, "name": "text"}
        if self.kind == "dataclass":
            return Pair(h, None)
        return h, None, (h.sin(), [h.cos()])


class Structures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kinds = ("dict", "dataclass", "tuple") * 2
        self.layers = nn.ModuleList(Splitter(kind) for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = None
        for layer in self.layers:
            out = layer(x, extra=extra)
            if layer.kind == "dict":
                assert out["none"] is None
                assert out["name"] == "text"
                x, extra = out["hidden"], out["extra"]
            elif layer.kind == "dataclass":
                assert out.extra is None
                assert out.label == "pair"
                x, extra = out.hidden, None
            else:
                x, extra = out[0] + out[2][0], out[2][1][0]
        return x


def case_structured_outputs_and_keyword_arguments() -> None:
    compare(Structures, regress, [batch(), batch()])


def case_step_returns_dataclass_and_none() -> None:
    def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> Pair:
        loss = F.mse_loss(model(x), y)
        model.backward(loss)
        return Pair(loss, None, "step")

    torch.manual_seed(1)
    module = mlp()
    reference = copy.deepcopy(module)
    data = batch()
    expected = run_plain(reference, body, data)
    got = smp.step(body)(smp.DistributedModel(module), *own_share(data, [0, 0]))
    assert isinstance(got, Pair)
    assert got.extra is None
    assert got.label == "step"
    assert_same_results(got.hidden, [one.hidden for one in expected])


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Splitter("tuple") for _ in range(6))

    def forward(self, *, x: torch.Tensor, mask: torch.Tensor, power: int = 1) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x=x, extra=mask)[0] ** power
        return x


def case_keyword_arguments_of_step_and_model() -> None:
    @smp.step
    def train(model: Any, *, x: torch.Tensor, mask: torch.Tensor, power: int) -> Any:
        loss = model(x=x, mask=mask, power=power).square().mean()
        model.backward(loss)
        return loss

    torch.manual_seed(1)
    module = Masked()
    reference = copy.deepcopy(module)
    model = smp.DistributedModel(module)
    for power in (1, 2):  # a Python argument is part of what is recorded
        x, mask = batch()
        reference.zero_grad()
        model.zero_grad()

        def body(
            plain: Any, x: torch.Tensor, mask: torch.Tensor, power: int = power
        ) -> torch.Tensor:
            loss: torch.Tensor = plain(x=x, mask=mask, power=power).square().mean()
            plain.backward(loss)
            return loss

        expected = run_plain(reference, body, [x, mask])
        x, mask = own_share([x, mask], [0, 0])
        assert_same_results(train(model, x=x, mask=mask, power=power), expected)
        assert_same_gradients(model, reference)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
                for _ in range(5)
            )
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def case_batch_norm() -> None:
    # With replicas, each normalises by its own microbatches, and so does the reference; but the
    # buffers follow the first replica, which the reference, with one set, cannot show.
    model = compare(Normed, regress, [batch(16), batch(16)])
    tracked = [b for n, b in model.local_named_buffers() if n.endswith("num_batches_tracked")]
    assert all(int(count) == 2 * MICROBATCHES for count in tracked)


class Convolving(nn.Module):
    """Images, by layers and by a function between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=groups), nn.GroupNorm(2, 4))
            for groups in (1, 2, 1, 4)
        )
        self.first = nn.Conv2d(1, 4, 3, stride=2)
        self.kernel = nn.Parameter(torch.rand(4, 4, 1, 1))
        self.head = nn.Linear(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.view(-1, 1, 4, WIDTH // 4))
        for layer in self.layers:
            x = nn.functional.conv2d(torch.relu(layer(x)), self.kernel, stride=1)
        return self.head(x.mean((2, 3)))


def case_convolutions() -> None:
    compare(Convolving, regress, [batch(), batch()])


def case_dropout() -> dict[str, Any]:
    """Returns losses and gradients; they must be the same for every number of partitions."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
            self.drops = nn.ModuleList(nn.Dropout(0.3) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, layer in enumerate(self.layers):
                x = self.drops[index % 3](torch.tanh(layer(x)))
            return x

    torch.manual_seed(1)
    model = smp.DistributedModel(Dropping())
    step = smp.step(regress)
    data = own_share([torch.randn(16, WIDTH), torch.randn(16, WIDTH)], [0, 0])
    losses = [step(model, *data).outputs for _ in range(2)]
    assert_is_split(model)
    assert not torch.equal(losses[0][0], losses[1][0])
    gradients = {name: p.grad for name, p in model.local_named_parameters()}
    return {"losses": losses, "gradients": gradients, "dp_rank": smp.dp_rank()}


def case_functional_dropout_in_a_split_module() -> list[float]:
    """Returns the losses; they must be the same for every number of partitions."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = F.dropout(torch.tanh(layer(x)), 0.3, self.training)
            return x

    torch.manual_seed(1)
    loss = smp.step(regress)(smp.DistributedModel(Dropping()), *batch())
    return [one.item() for one in loss.outputs]


def case_blocks_with_dropout_left_out_at_random() -> list[list[float]]:
    """Returns the losses. A block that was left out at first must still draw by its key later."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)) for _ in range(4)
            )
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                chance = torch.rand([])
                if chance * 2 < 1:
                    x = x + torch.tanh(block(x))
            return self.last(x)

    torch.manual_seed(1)
    model, step = smp.DistributedModel(Blocks()), smp.step(regress)
    x, y = batch()
    losses = [[one.item() for one in step(model, x, y).outputs] for _ in range(4)]
    # All blocks may have been left out twice.
    assert len({loss for each in losses for loss in each}) > 3 * len(losses[0])
    return losses


def case_modules_that_a_forward_adds() -> list[list[float]]:
    """Returns the losses. The new dropout of a layer draws by its key from its first call on."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity()) for _ in range(4)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if self.training and isinstance(layer[1], nn.Identity):
                    layer[1] = nn.Sequential(nn.Dropout(0.4), nn.Tanh())
                x = layer(x)
            return x

    torch.manual_seed(1)
    model, step = smp.DistributedModel(Growing()), smp.step(regress)
    x, y = batch()
    losses = []
    for trains in (False, True, True):
        model.train(trains)
        losses.append([one.item() for one in step(model, x, y).outputs])
    assert losses[1] != losses[2]
    return losses


def case_backward_from_given_gradients() -> None:
    def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        model.backward([out, out.square().mean()], [(out - y) / x.shape[0], None])
        return out

    def single(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        model.backward(out, torch.ones_like(out) * y[0])
        return out

    compare(mlp, body, [batch(), batch()])
    compare(mlp, single, [batch()])


def case_complex_and_integer_activations() -> None:
    class Transform(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(super().forward(x))

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.response = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = x * self.response
            return x, x.abs().argmax(-1)

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Transform(WIDTH, WIDTH), Filter()
            self.third, self.fourth = nn.Embedding(WIDTH, WIDTH), Transform(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            filtered, loudest = self.second(self.first(x))
            back = torch.fft.ifft(filtered).real
            return self.fourth(back + self.third(loudest)).abs()

    compare(Spectral, regress, [batch(), batch()])


def case_autocast() -> None:
    def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            out = model(x)
        assert out.dtype == torch.bfloat16
        loss = F.mse_loss(out.float(), y)
        model.backward(loss)
        return loss

    compare(mlp, body, [batch(), batch()])


def case_autocast_around_the_step() -> None:
    torch.manual_seed(1)
    module = mlp()
    reference = copy.deepcopy(module)
    model = smp.DistributedModel(module)
    step = smp.step(regress)
    for dtype in (None, torch.bfloat16, None):
        data = batch()
        model.zero_grad()
        reference.zero_grad()
        with torch.autocast(data[0].device.type, dtype=dtype, enabled=dtype is not None):
            expected = run_plain(reference, regress, data)
            got = step(model, *own_share(data, [0, 0]))
        assert_same_results(got, expected)
        assert_same_gradients(model, reference)


def case_uneven_and_changing_batches() -> None:
    compare(mlp, regress, [batch(8), batch(10), batch(7), batch(8)])


def case_validation_alternates_with_training() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Normed() for _ in range(4)))

        def forward(self, x: torch.Tensor) -> Any:
            return self.layers(x)

    def validate(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), y)

    torch.manual_seed(1)
    module = Model()
    reference = copy.deepcopy(module)
    model = smp.DistributedModel(module)
    train_step, validation_step = smp.step(regress), smp.step(validate)
    for _ in range(2):
        model.train()
        reference.train()
        model.zero_grad()
        reference.zero_grad()
        # One buffer set cannot stand for two replicas: give both the same data.
        share = [torch.randn(16, WIDTH), torch.randn(16, WIDTH)]
        data = [torch.cat([tensor] * smp.dp_size()) for tensor in share]
        states = copy.deepcopy(reference.state_dict())
        expected = run_plain(reference, regress, data)
        if smp.dp_size() > 1:
            reference.load_state_dict(states)
            with torch.no_grad():
                for microbatch in split(share, [0, 0])[0]:
                    reference(microbatch[0])
        assert_same_results(train_step(model, *share), expected)
        assert_same_gradients(model, reference)
        model.eval()
        reference.eval()
        gradients = {name: copy.deepcopy(p.grad) for name, p in model.local_named_parameters()}
        with torch.no_grad():
            expected = run_plain(reference, validate, data)
            got = validation_step(model, *(share if smp.pp_rank() == 0 else empty(share)))
        assert_same_results(got, expected)
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=0)
    assert_is_split(model)


def case_two_step_functions() -> None:
    def absolute(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = (model(y) - x).abs().mean()
        model.backward(loss)
        return loss

    torch.manual_seed(1)
    module = mlp()
    reference = copy.deepcopy(module)
    model = smp.DistributedModel(module)
    steps = {regress: smp.step(regress), absolute: smp.step(absolute)}
    data = batch()
    for body in (regress, absolute, regress):  # gradients accumulate over the calls
        expected = run_plain(reference, body, data)
        assert_same_results(steps[body](model, *own_share(data, [0, 0])), expected)
        assert_same_gradients(model, reference)


def case_two_models() -> None:
    torch.manual_seed(1)
    modules = [mlp(4), mlp(3)]
    references = [copy.deepcopy(module) for module in modules]
    models = [smp.DistributedModel(module) for module in modules]
    steps = [smp.step(regress) for _ in models]
    for round_ in range(2):
        for model, reference, step in zip(models, references, steps, strict=True):
            data = batch()
            model.zero_grad()
            reference.zero_grad()
            expected = run_plain(reference, regress, data)
            assert_same_results(step(model, *own_share(data, [0, 0])), expected)
            assert_same_gradients(model, reference)
            if round_:
                assert_is_split(model)


def case_two_models_in_one_step() -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(models[1](models[0](x)), y)
        models[0].backward(loss)
        return loss

    def plain(whole: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return regress(whole, x, y)

    torch.manual_seed(1)
    modules = [mlp(4), mlp(4)]
    references = [copy.deepcopy(module) for module in modules]
    models = [smp.DistributedModel(module) for module in modules]
    data = batch()
    expected = run_plain(nn.Sequential(*references), plain, data)
    assert_same_results(smp.step(both)(*own_share(data, [0, 0])), expected)
    for model, reference in zip(models, references, strict=True):
        assert_same_gradients(model, reference)


def case_whole_inputs_and_other_axes() -> None:
    def body(model: Any, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert weight.shape == (WIDTH,)
        loss = (F.mse_loss(model(x.transpose(0, 1)), y, reduction="none") * weight).mean()
        model.backward(loss)
        return loss

    x, y = batch()
    compare(
        mlp,
        body,
        [[x.transpose(0, 1), y, torch.rand(WIDTH)]],
        axes=[1, 0, None],
        options={"non_split_inputs": ["weight"], "input_split_axes": {"x": 1}},
    )


def case_step_is_a_method() -> None:
    class Trainer:
        def __init__(self, model: Any) -> None:
            self.model = model
            self.factor = 3.0

        def body(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.mse_loss(self.model(x), y) * self.factor
            self.model.backward(loss)
            return loss

        @smp.step
        def train(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.body(x, y)

    torch.manual_seed(1)
    module = mlp()
    reference = copy.deepcopy(module)
    data = batch()
    expected = run_plain(reference, lambda plain, x, y: Trainer(plain).body(x, y), data)
    model = smp.DistributedModel(module)
    assert_same_results(Trainer(model).train(*own_share(data, [0, 0])), expected)
    assert_same_gradients(model, reference)


def case_python_numbers_are_returned() -> None:
    @smp.step
    def train(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        model.backward(loss)
        return loss, len(x), 2.5, "text", None

    model = smp.DistributedModel(mlp())
    loss, sizes, factors, text, none = train(model, *own_share(batch(), [0, 0]))
    assert isinstance(loss, smp.StepOutput)
    assert sizes == [2] * MICROBATCHES
    assert factors == [2.5] * MICROBATCHES
    assert text == "text"
    assert none is None


def case_buffers_are_returned_and_inputs_too() -> None:
    def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        model.backward(loss)
        return loss, x * 2, (y > 0).float().mean()

    compare(mlp, body, [batch()])


def case_unused_module_and_frozen_parameters() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = mlp()
            self.unused = nn.Linear(WIDTH, WIDTH)
            self.used[0].requires_grad_(False)
            self.used[6].bias.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.used(x)

    compare(Partly, regress, [batch(), batch()])


def case_sum_of_losses_one_inside_the_pipeline() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            penalty = x.new_zeros(())
            for layer in self.layers:
                x = torch.tanh(layer(x))
                penalty = penalty + x.square().mean()
            return x, penalty

    def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        out, penalty = model(x)
        loss = F.mse_loss(out, y) + 0.1 * penalty
        model.backward(loss)
        return loss, penalty

    compare(Inner, body, [batch(), batch()])


def case_backward_of_several_losses() -> None:
    def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = model(x)
        first, second = F.mse_loss(out, y), out.abs().mean()
        model.backward(first + second)
        return first, second

    compare(mlp, body, [batch()])


def _train(
    schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None,
) -> None:
    # Adam divides gradients by their size, so it turns the last bit of a small one into a step:
    # the tied gradients, which are summed in another order here, are computed in float64.
    torch.manual_seed(1)
    module = Tied().double()
    reference = copy.deepcopy(module)
    plain_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    schedulers = [schedule(each) for each in (optimizer, plain_optimizer)] if schedule else []
    step = smp.step(predict_tokens)
    for _ in range(3):
        data = [torch.randint(11, (8 * smp.dp_size(), 6))]
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        expected = run_plain(reference, predict_tokens, data)
        assert_same_results(step(model, *own_share(data, [0])), expected)
        optimizer.step()
        plain_optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    if schedulers:
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
        assert optimizer.param_groups[0]["lr"] == plain_optimizer.param_groups[0]["lr"] != 1e-2
    state, expected_state = model.state_dict(), reference.state_dict()
    assert list(state) == list(expected_state)
    for name, tensor in expected_state.items():
        torch.testing.assert_close(state[name].cpu(), tensor.cpu())


def case_state_after_three_steps() -> None:
    _train(None)


def case_learning_rate_scheduler() -> None:
    _train(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))


def case_equal_to_the_last_bit_after_three_steps() -> None:
    """Nothing is summed in another order with one replica and no parameter used twice."""
    torch.manual_seed(1)
    module = mlp()
    reference = copy.deepcopy(module)
    plain_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = smp.step(regress)
    share = [torch.randn(8, WIDTH), torch.randn(8, WIDTH)]
    data = [torch.cat([tensor] * smp.dp_size()) for tensor in share]
    for _ in range(3):
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        run_plain(reference, regress, data)
        step(model, *share)
        optimizer.step()
        plain_optimizer.step()
    state = model.state_dict()
    for name, tensor in reference.state_dict().items():
        if smp.dp_size() == 1:
            assert torch.equal(state[name].cpu(), tensor.cpu()), name
        torch.testing.assert_close(state[name].cpu(), tensor.cpu())


def case_gradients_add_up_without_zero_grad() -> None:
    torch.manual_seed(1)
    module = mlp()
    reference = copy.deepcopy(module)
    # The library averages what has been added up; with replicas that is once a step.
    model = smp.DistributedModel(module)
    step = smp.step(regress)
    for _ in range(3):
        data = batch()
        run_plain(reference, regress, data)
        step(model, *own_share(data, [0, 0]))
        assert_same_gradients(model, reference)


def case_backward_passes_per_step() -> None:
    torch.manual_seed(1)
    module = mlp()
    reference = copy.deepcopy(module)
    model = smp.DistributedModel(module, backward_passes_per_step=2)
    step = smp.step(regress)
    for _ in range(2):
        data = batch()
        run_plain(reference, regress, data)
        step(model, *own_share(data, [0, 0]))
    assert_same_gradients(model, reference)


def case_gradients_are_summed_on_request() -> None:
    torch.manual_seed(1)
    module = mlp()
    reference = copy.deepcopy(module)
    model = smp.DistributedModel(module, average_grads_across_microbatches=False)
    data = batch()
    run_plain(reference, regress, data)
    for parameter in reference.parameters():
        assert parameter.grad is not None
        parameter.grad *= MICROBATCHES
    smp.step(regress)(model, *own_share(data, [0, 0]))
    assert_same_gradients(model, reference)


def case_constants_and_non_tensor_arguments() -> None:
    def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        positions = torch.arange(WIDTH, dtype=torch.float32) / WIDTH
        shift = torch.tensor([0.5])
        mask = torch.ones(len(x), 1).masked_fill_(x[:, :1] > 0, 0.5)
        loss = ((model(x + positions) * mask + shift - y) ** 2).mean()
        model.backward(loss)
        return loss

    compare(mlp, body, [batch(), batch()])


def cases(*, only: Sequence[str] = ()) -> dict[str, Callable[[], Any]]:
    """Returns the cases of this module by name."""
    found = {
        name.removeprefix("case_"): value
        for name, value in globals().items()
        if name.startswith("case_")
    }
    return {name: found[name] for name in only or found}
