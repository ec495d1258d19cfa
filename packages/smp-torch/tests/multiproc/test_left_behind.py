"""What scripts leave in objects, lists and attributes, and do to memory, is seen or refused."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from test_owners import sharded, tensor
from torch import nn
from torch.nn import functional as F
from world import pipeline, run, world_of

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import PartitionError, SMPError, UnsupportedError
from smdistributed.modelparallel.common.testing import Worlds

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]

WIDTH, LAYERS = 8, 4
SHARDS = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 2}
WORLDS = {
    "pp2": pipeline(2),
    "dp2": world_of(2, {"microbatches": 4, "ddp": True}),
    "oss2": sharded(2),
    "tp2": tensor(2),
    "tp2-prescaled": tensor(2, prescaled_batch=True),
    "sdp2": world_of(2, {**SHARDS, "microbatches": 2, "ddp": True}),
}


class Cache:
    """Keys of layers, by their numbers."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}

    def update(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        known = self.keys.get(layer)
        self.keys[layer] = keys if known is None else torch.cat([known, keys])
        return self.keys[layer]


def doubled(module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
    """A hook that computes."""
    return 2 * args[0]


class Layer(nn.Module):
    """Attends to what it has left in a cache."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        # Part of what the layer computes, also where it is called to be compared.
        self.query.register_forward_pre_hook(doubled)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        keys = self.key(x)
        if isinstance(cache, Cache):
            keys = cache.update(self.number, keys)
        else:
            cache.append(keys)
        return x + torch.softmax(self.query(x) @ keys.T, -1) @ keys


class Layers(nn.Module):
    """Hands a cache to its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, range(LAYERS)))

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, cache)
        return x


def seen_in_order() -> None:
    """A call whose result nobody uses comes before the one that reads what it has left."""
    torch.manual_seed(0)
    module = Layers()
    plain, model = copy.deepcopy(module), smp.DistributedModel(module)

    def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        with torch.no_grad():
            model(x, cache)
        loss: torch.Tensor = F.mse_loss(model(y, cache), x)
        return loss

    @smp.step
    def train(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = body(model, x, y)
        model.backward(loss)
        return loss.detach()

    for _ in range(2):
        data = torch.randn(2, 8, WIDTH).unbind()
        count = int(smp.state.cfg.microbatches)
        want = [
            body(plain, *each) for each in zip(*(one.chunk(count) for one in data), strict=True)
        ]
        plain.zero_grad()
        (sum(want) / count).backward()  # type: ignore[union-attr]
        model.zero_grad()
        torch.testing.assert_close(train(model, *data).stack(), torch.stack(want).detach())
        expected = dict(plain.named_parameters())
        for name, parameter in model.local_named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name].grad)


class Named(nn.Linear):
    """Sets an attribute on what it returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        x.scale = 0.5  # type: ignore[attr-defined]
        return x


def refused_in_steps(kind: str) -> None:
    def lists(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x, []).mean()

    def unused(model: Any, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        model(x, cache)
        return model(x, cache).mean()

    def twice(model: Any, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        return model(x, cache).mean() + model(x, cache).mean()

    def attributes(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).mean()

    body, want = {
        "lists": (lists, "changes a list that it is given"),
        "unused": (unused, "whose results are not part of the loss"),
        "twice": (twice, "its gradient cannot go back there"),
        "attributes": (attributes, "sets the attribute scale on a tensor"),
    }[kind]
    module = Layers() if kind != "attributes" else nn.Sequential(Named(8, 8), nn.Linear(8, 8))
    model = smp.DistributedModel(module)

    @smp.step
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = body(model, x)
        model.backward(loss)
        return loss

    with pytest.raises(SMPError, match=want):
        train(model, torch.randn(8, WIDTH))


class Storing(nn.Module):
    """Stores what it computes, as autoencoders do with a term of their loss, and a log of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.term: Any = None
        self.log: list[torch.Tensor] = []
        self.reads_before = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads_before:
            x = x + self.term
        states = self.encoder(x)
        self.term = states.square().mean()
        self.log.append(states.mean())
        decoded: torch.Tensor = self.decoder(states.tanh())
        return decoded


def stored_in_split_modules() -> None:
    net = Storing()
    plain, model = copy.deepcopy(net), smp.DistributedModel(net)

    def loss_of(model: Any, net: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (model(x) - x).square().mean() + net.term
        return loss

    @smp.step
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, net, x)
        model.backward(loss)
        return loss

    for number in range(3):
        x = torch.full((8, WIDTH), number - 1.0) + torch.arange(8.0)[:, None]
        found = train(model, x).reduce_mean()
        losses = [loss_of(plain, plain, part).detach() for part in x.chunk(4)]
        # On every rank the last microbatch has left its own.
        torch.testing.assert_close(found, torch.stack(losses).mean())
        torch.testing.assert_close(net.term, plain.term.detach())
        torch.testing.assert_close(torch.stack(net.log), torch.stack(plain.log).detach())
    net.reads_before = True
    with pytest.raises(UnsupportedError, match="an earlier microbatch of a pipelined step stored"):
        train(model, x)


class Collecting(nn.Module):
    """Puts what its layers make into a list of its caller's, in code that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            made.append(x)
        return x


def lists_of_split_modules() -> None:
    module = Collecting()
    plain, model = copy.deepcopy(module), smp.DistributedModel(module)

    def body(model: Any, x: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = []
        return model(x, made).mean() + torch.stack(made).square().sum()

    step = smp.step(body)
    for _ in range(2):
        x = torch.randn(8, WIDTH)
        want = torch.stack([body(plain, each) for each in x.chunk(int(smp.state.cfg.microbatches))])
        torch.testing.assert_close(step(model, x).stack(), want.detach())


def tied_by_data() -> nn.Module:
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    module[3].weight.data = module[0].weight.data
    return module


def tied_in_a_pipeline() -> None:
    model = smp.DistributedModel(tied_by_data())

    @smp.step
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        model.backward(loss)
        return loss

    with pytest.raises(PartitionError, match="have memory in common and are two objects"):
        train(model, torch.randn(8, WIDTH))


def tied_where_ranks_have_parts() -> None:
    with pytest.raises(UnsupportedError, match="have memory in common and are two objects"):
        smp.DistributedModel(tied_by_data())
    smp.DistributedModel(nn.LSTM(8, 8))  # its weights lie side by side


def replaced_after_it_was_cut() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    first = copy.deepcopy(module[0])
    model = smp.DistributedModel(module)
    step = smp.step(lambda model, x: model(x))
    step(model, torch.randn(4, WIDTH))
    module[1] = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    given = torch.randn(4, WIDTH)
    made = torch.cat(step(model, given).outputs)
    torch.testing.assert_close(made, module[1](first(given)))
    module[1].requires_grad_(True)
    with pytest.raises(UnsupportedError, match="weight has been put into the model after"):
        step(model, given)


def renormalized() -> None:
    with pytest.raises(UnsupportedError, match="its calls shorten the rows"):
        smp.DistributedModel(nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)))


def expanded_buffers() -> None:
    """Replicas get the numbers of a buffer, and nothing behind its memory is written."""
    module = nn.Linear(4, 4)
    base = torch.full((1, 3, 1), float(smp.rank()))
    module.register_buffer("wide", base.expand(5000, 3, 7))
    module.register_buffer("turned", torch.full((2, 3), float(smp.rank())).t())
    model = smp.DistributedModel(module)
    smp.step(lambda model, x: model(x))(model, torch.randn(4, 4))
    assert not model.get_module().wide.any()
    assert not model.get_module().turned.any()


def cleared_accumulations() -> None:
    """Of steps whose gradients were cleared nothing is left where ranks have parts of the sums."""
    for clears_by_model in (False, True):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        plain = copy.deepcopy(module)
        model = smp.DistributedModel(module, backward_passes_per_step=3)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        other = torch.optim.SGD(plain.parameters(), lr=0.1)

        @smp.step
        def train(model: Any, x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        for number in range(4):  # two that are cleared, and two that end early
            x = torch.randn(8, WIDTH)
            train(model, x.chunk(smp.dp_size())[smp.dp_rank()])
            plain(x).square().mean().backward()
            if number == 1:
                (model if clears_by_model else optimizer).zero_grad()
                other.zero_grad()
        optimizer.step()
        other.step()
        state = model.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value)


class WholeNorms(torch.optim.SGD):
    """An update of its own."""

    def step(self, closure: Any = None) -> None:
        """Does nothing."""


def made(module: nn.Module) -> Any:
    with smp.tensor_parallelism():
        smp.set_tensor_parallelism(module, True)
    return smp.DistributedModel(module)


def additions_are_kept() -> None:
    """What has hooks, or a compiled wrapper, stays whole."""
    hooked = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    hooked[0].register_forward_pre_hook(lambda module, args: None)
    hooked[1].weight.register_hook(lambda gradient: gradient)
    hooked[2].forward = hooked[2].forward  # type: ignore[method-assign]
    wrapped = torch.compile(hooked[3], backend="eager")
    model = made(nn.Sequential(*hooked[:3], wrapped, nn.Linear(WIDTH, WIDTH))).get_module()
    kinds = [type(each).__name__ for each in model]
    assert kinds == ["Linear"] * 3 + ["OptimizedModule", "DistributedLinear"], kinds
    assert type(wrapped._orig_mod) is nn.Linear


def trains_as_plain(module: nn.Module, plain: nn.Module, make: Any, **options: Any) -> None:
    """Holds that an optimizer of a model gives the parameters that it gives in one process."""
    model = smp.DistributedModel(module)

    @smp.step
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    optimizer = smp.DistributedOptimizer(make(model.parameters(), **options))
    other = make(plain.parameters(), **options)
    for _ in range(2):
        x = torch.randn(8, WIDTH)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            return train(model, x).reduce_mean()

        def plainly(x: torch.Tensor = x) -> torch.Tensor:
            other.zero_grad()
            loss = plain(x).square().mean()
            loss.backward()
            return loss

        if make is torch.optim.LBFGS:
            optimizer.step(closure)
            other.step(plainly)
        else:
            closure(), plainly(), optimizer.step(), other.step()
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)


def optimizers_of_whole_tensors() -> None:
    for make, options in (
        (torch.optim.LBFGS, {"max_iter": 2, "line_search_fn": "strong_wolfe"}),
        (WholeNorms, {"lr": 0.1}),
    ):
        plain = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        module = copy.deepcopy(plain)
        smp.set_tensor_parallelism(module, True)
        trains_as_plain(module, plain, make, **options)


class Clipping(torch.optim.AdamW):
    """Clips by the norm of all gradients, by torch's function or by its own."""

    is_torchs = True

    def step(self, closure: Any = None) -> Any:
        given = [each for group in self.param_groups for each in group["params"]]
        if self.is_torchs:
            nn.utils.clip_grad_norm_(given, 0.01)
        else:
            norms = [each.grad.norm() for each in given if each.grad is not None]
            for each in given:
                if each.grad is not None:
                    each.grad.mul_(0.01 / torch.stack(norms).norm())
        return super().step(closure)


class OwnClipping(Clipping):
    is_torchs = False


def optimizers_that_see_all_gradients() -> None:
    """They update as the script's own code; with masters ranks do not have what they look for."""
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    if smp.state.cfg.shard_optimizer_state:
        model = smp.DistributedModel(plain)
        for kind in (OwnClipping, Clipping):
            with pytest.raises(UnsupportedError, match=f"{kind.__name__} updates a parameter by"):
                smp.DistributedOptimizer(kind(model.parameters(), lr=0.1))
        return
    trains_as_plain(copy.deepcopy(plain), copy.deepcopy(plain), Clipping, lr=0.1)
    trains_as_plain(copy.deepcopy(plain), copy.deepcopy(plain), OwnClipping, lr=0.1)
    options = {"max_iter": 1, "line_search_fn": "strong_wolfe"}
    trains_as_plain(copy.deepcopy(plain), plain, torch.optim.LBFGS, **options)


class Twice(nn.Module):
    """One map under two names: of itself, or of two modules in it."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        ]
        self.one, self.other = blocks
        self.again = nn.Linear(WIDTH, WIDTH)
        self.last = self.again
        if inside:
            self.other[0] = self.one[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.other(self.one(self.again(x))))


def shared_maps_stay_shared() -> None:
    for inside, auto in itertools.product((False, True), repeat=2):
        torch.manual_seed(3)
        plain = Twice(inside=inside)
        torch.manual_seed(3)
        with smp.tensor_parallelism(auto=auto):
            module = Twice(inside=inside)
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        other = torch.optim.AdamW(plain.parameters(), lr=0.1)

        @smp.step
        def train(model: Any, x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        split = [type(each).__name__ for each in module.modules()]
        assert any(name in ("DistributedLinear", "SplitLinear") for name in split), split
        for _ in range(3):
            x = torch.randn(8, WIDTH)
            optimizer.zero_grad()
            other.zero_grad()
            train(model, x.chunk(smp.dp_size())[smp.dp_rank()])
            plain(x).square().mean().backward()
            optimizer.step()
            other.step()
        state = model.state_dict()
        assert state.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value)
        model.load_state_dict(plain.state_dict())
        assert sum(1 for _ in model.parameters()) == sum(1 for _ in plain.parameters())


class Biased(nn.Module):
    """Attends with a mask that it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, 4, 5, 5))
        self.attention = smp.nn.DistributedAttentionLayer(
            num_attention_heads=4,
            attention_head_size=2,
            hidden_size=WIDTH,
            attention_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.attention((x, self.bias))
        return made


def learned_masks() -> None:
    model = smp.DistributedModel(Biased().double())
    rank = smp.rdp_rank() if smp.state.cfg.prescaled_batch else smp.dp_rank()
    draws = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 5, WIDTH, generator=draws, dtype=torch.float64)

    @smp.step
    def value(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sin().mean()
        if torch.is_grad_enabled():
            model.backward(loss)
        return loss

    value(model, x)
    bias = model.get_module().bias
    draws = torch.Generator().manual_seed(7)
    along = torch.randn(bias.shape, generator=draws, dtype=torch.float64)
    found = []
    for sign in (1, -2):
        with torch.no_grad():
            bias.add_(along, alpha=sign * 1e-5)
            found.append(value(model, x).reduce_mean().item())
    slopes = smp.allgather((found[0] - found[1]) / 2e-5, smp.WORLD)
    assert (bias.grad * along).sum().item() == pytest.approx(sum(slopes) / len(slopes), rel=1e-5)


def odd_rotations() -> None:
    with pytest.raises(ValueError, match="rotary_dim must be even"):
        smp.nn.DistributedTransformerLayer(
            num_attention_heads=4, attention_head_size=8, hidden_size=32, rotary_dim=3
        )


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.three, self.four = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
        x = self.two(torch.tanh(self.one(x)))
        late[:, 1:].add_(x.detach().mean())
        return self.four(torch.tanh(self.three(x + late)))


def models_are_let_go() -> None:
    """A step function that lives on keeps no model that the script has dropped."""

    @smp.step
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        return loss.detach()

    for _ in range(2):
        model = smp.DistributedModel(nn.Linear(WIDTH, WIDTH))
        train(model, torch.randn(4, WIDTH))
        known = weakref.ref(model)
        del model
        gc.collect()
        assert known() is None


def batches_that_steps_change() -> None:
    """What a step writes to its batch, from the batch and from activations, is in the batch."""
    module = Deep()
    plain = copy.deepcopy(module)
    model = smp.DistributedModel(module)

    def body(model: Any, x: torch.Tensor, late: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x.mul_(1.1)
        x[:, 0].add_(1)
        labels[labels < 0] = 0.5
        loss: torch.Tensor = (model(x, late) - labels).square().mean()
        return loss

    @smp.step
    def train(model: Any, *given: torch.Tensor) -> torch.Tensor:
        loss = body(model, *given)
        model.backward(loss)
        return loss

    @smp.step(non_split_inputs=["x"])
    def together(model: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        made: torch.Tensor = model(x, x.clone())
        return made

    given = [torch.randn(8, WIDTH) for _ in range(3)]
    same = [each.clone() for each in given]
    count = smp.state.cfg.microbatches
    for _ in range(3):
        loss = train(model, *given).reduce_mean()
        want = sum(
            body(plain, *parts) / count
            for parts in zip(*(each.chunk(count) for each in same), strict=True)
        )
        torch.testing.assert_close(loss, want.detach())
        for one, other in zip(given, same, strict=True):
            torch.testing.assert_close(one, other)
    with pytest.raises(UnsupportedError, match="not split over microbatches"):
        together(model, given[0])
    wide = torch.randn(8, 2 * WIDTH)
    for one, other in ((given[1], given[1]), (wide[:, :WIDTH], wide[:, 1 : WIDTH + 1])):
        # Only rank 0 says what is given, and so what shares memory.
        mine = (one, other) if smp.pp_rank() == 0 else (one, other.clone())
        with pytest.raises(UnsupportedError, match=r"shares its memory.*numbers 0 and 1"):
            train(model, *mine, given[2])
    apart = wide[:, :WIDTH], wide[:4].flip(1).repeat(2, 1)[:, :WIDTH]
    assert train(model, *apart, given[2]).reduce_mean().isfinite()


def numbers_of_tied_parameters() -> None:
    """A parameter with several names has one for all ranks, that of its first place."""
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    plain[1].weight = plain[2].weight = plain[0].weight
    model = smp.DistributedModel(copy.deepcopy(plain))

    @smp.step
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    x = torch.randn(8, WIDTH)
    train(model, x), plain(x).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.norm().item() == pytest.approx(other.norm().item())
        assert one.grad.norm().item() == pytest.approx(other.grad.norm().item(), rel=1e-4)


CASES: dict[str, tuple[str, Any]] = {
    "batches_that_steps_change": ("pp2", batches_that_steps_change),
    "shared_maps_stay_shared": ("tp2", shared_maps_stay_shared),
    "learned_masks": ("tp2", learned_masks),
    "learned_masks_of_one_batch": ("tp2-prescaled", learned_masks),
    "odd_rotations": ("tp2", odd_rotations),
    "see_all_in_a_pipeline": ("pp2", optimizers_that_see_all_gradients),
    "see_all_with_owners": ("oss2", optimizers_that_see_all_gradients),
    "seen_in_order": ("pp2", seen_in_order),
    "lists_of_split_modules": ("pp2", lists_of_split_modules),
    "stored_in_split_modules": ("pp2", stored_in_split_modules),
    "tied_in_a_pipeline": ("pp2", tied_in_a_pipeline),
    "numbers_of_tied_parameters": ("pp2", numbers_of_tied_parameters),
    "tied_with_owners": ("oss2", tied_where_ranks_have_parts),
    "tied_in_shards": ("sdp2", tied_where_ranks_have_parts),
    "tied_in_slices": ("tp2", tied_where_ranks_have_parts),
    "replaced_after_it_was_cut": ("sdp2", replaced_after_it_was_cut),
    "cleared_in_shards": ("sdp2", cleared_accumulations),
    "cleared_with_owners": ("oss2", cleared_accumulations),
    "renormalized": ("dp2", renormalized),
    "expanded_buffers": ("dp2", expanded_buffers),
    "additions_are_kept": ("tp2", additions_are_kept),
    "optimizers_of_whole_tensors": ("tp2", optimizers_of_whole_tensors),
    "models_are_let_go": ("dp2", models_are_let_go),
}


def run_case(name: str) -> None:
    torch.manual_seed(3)
    CASES[name][1]()


@pytest.mark.parametrize("name", CASES)
def test_never_silently_wrong(worlds: Worlds, name: str) -> None:
    run(worlds, WORLDS[CASES[name][0]], run_case, name)


@pytest.mark.parametrize("kind", ["lists", "unused", "attributes"])
def test_what_modules_leave_is_refused(worlds: Worlds, kind: str) -> None:
    run(worlds, WORLDS["pp2"], refused_in_steps, kind)
