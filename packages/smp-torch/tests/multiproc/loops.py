"""A population of training loops: what scripts do between two calls of a step function.

Each is a loop over a few steps, run as plain PyTorch and with the library: the results of every
step and the whole state at the end must be the same, or the library must refuse it. Long because it
is a table of scripts.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from reference import MICROBATCHES
from small_scripts import is_split
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import lr_scheduler
from world import generator

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import CommError, SMPError

WIDTH, CLASSES, STEPS = 6, 3, 4
EXAMPLES = 4 * MICROBATCHES
TOLERANCE = 5e-4


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Any) -> Any:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Blocks, statistics, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.scale)


class Alone(nn.Module):
    """A module with the ``backward`` of a DistributedModel, in one process."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["module"], name)

    def __call__(self, *args: Any) -> Any:
        return self.__dict__["module"](*args)

    def backward(self, tensors: Any, grad_tensors: Any = None) -> None:
        tensors = tensors if isinstance(tensors, list) else [tensors]
        starts = None if grad_tensors is None else [grad_tensors]
        torch.autograd.backward([each / MICROBATCHES for each in tensors], starts)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["module"].named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["module"].state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["module"].load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        return self.__dict__["module"].train(mode)

    def apply(self, function: Any) -> Any:
        return self.__dict__["module"].apply(function)


@dataclass
class Run:
    """A loop under way.

    Attributes:
        net: the user's model.
        model: what the script calls: the DistributedModel, or the same in one process.
        optimizer: what it steps.
        number: of the step.
        kept: what the script keeps from step to step.
        seen: numbers that it reads.
    """

    net: Any
    model: Any
    optimizer: Any = None
    number: int = 0
    kept: dict[str, Any] = field(default_factory=dict)
    seen: list[float] = field(default_factory=list)

    def parameters(self) -> list[torch.Tensor]:
        """Returns those with a gradient."""
        return [each for each in self.model.parameters() if each.grad is not None]


Act = Callable[[Run], object]


def _mean_entropy(model: Any, x: Any, y: Any) -> Any:
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


def _sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _nothing(run: Run) -> None:
    pass


def _clear(run: Run) -> None:
    run.optimizer.zero_grad()


def _update(run: Run) -> None:
    run.optimizer.step()


@dataclass(frozen=True)
class Loop:
    """What a script does, by place; see ``losses``."""

    prepare: Callable[[nn.Module], object] = lambda net: None
    optimizer: Callable[[Any], Any] = _sgd
    begin: Act = _nothing
    clear: Act = _clear
    body: Callable[[Any, Any, Any], Any] = _mean_entropy
    gradients: Act = _nothing
    update: Act = _update
    after: Act = _nothing


def _of(kind: str, **options: Any) -> Loop:
    def make(model: Any) -> Any:
        return getattr(torch.optim, kind)(model.parameters(), **{"lr": 0.01, **options})

    return Loop(optimizer=make)


def _groups(decide: Callable[[str, torch.Tensor], bool]) -> Loop:
    def make(model: Any) -> Any:
        parts: dict[bool, list[Any]] = {True: [], False: []}
        for name, each in model.named_parameters():
            parts[decide(name, each)].append(each)
        groups = [
            {"params": parts[True], "weight_decay": 0.1},
            {"params": parts[False], "lr": 0.05},
        ]
        return torch.optim.AdamW(groups, lr=0.01)

    return Loop(optimizer=make)


def _a_group_each(model: Any) -> Any:
    groups = [
        {"params": [each], "lr": 0.005 if "blocks" in name else 0.01}
        for name, each in model.named_parameters()
    ]
    return torch.optim.AdamW(groups)


def _of_the_trained(model: Any) -> Any:
    for name, each in model.named_parameters():
        each.requires_grad_("head" in name or "blocks.3" in name)
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)


OPTIMIZERS = {
    "Adam": _of("Adam"),
    "Adam, foreach": _of("Adam", foreach=True),
    "AdamW, amsgrad": _of("AdamW", amsgrad=True),
    "AdamW, fused": _of("AdamW", fused=True),
    "RMSprop": _of("RMSprop", centered=True),
    "Adagrad": _of("Adagrad"),
    "Adadelta": _of("Adadelta"),
    "NAdam": _of("NAdam"),
    "RAdam": _of("RAdam"),
    "Rprop": _of("Rprop"),
    "ASGD": _of("ASGD"),
    "Adamax": _of("Adamax"),
    "SGD, maximize": _of("SGD", maximize=True),
    "SGD, nesterov": _of("SGD", momentum=0.9, nesterov=True, weight_decay=0.1),
    "groups by dim": _groups(lambda name, each: each.dim() > 1),
    "groups by name": _groups(lambda name, each: "bias" not in name and "norm" not in name),
    "a group for each": Loop(optimizer=_a_group_each),
    "of the trained": Loop(optimizer=_of_the_trained),
    "by names": Loop(optimizer=lambda model: torch.optim.Adam(model.named_parameters(), lr=0.01)),
}


def _scheduled(make: Callable[[Any], Any], *, by_loss: bool = False) -> Loop:
    def begin(run: Run) -> None:
        run.kept["scheduler"] = make(run.optimizer)

    def after(run: Run) -> None:
        run.kept["scheduler"].step(*([run.seen[-1]] if by_loss else []))

    return Loop(begin=begin, after=after)


SCHEDULERS = {
    "StepLR": _scheduled(lambda each: lr_scheduler.StepLR(each, 1, 0.5)),
    "cosine": _scheduled(lambda each: lr_scheduler.CosineAnnealingLR(each, 4)),
    "one cycle": _scheduled(lambda each: lr_scheduler.OneCycleLR(each, 0.1, total_steps=10)),
    "a function": _scheduled(
        lambda each: lr_scheduler.LambdaLR(each, lambda epoch: 1 / (epoch + 1))
    ),
    "cyclic": _scheduled(lambda each: lr_scheduler.CyclicLR(each, 0.01, 0.1, 2)),
    "warming up": _scheduled(
        lambda each: lr_scheduler.SequentialLR(
            each,
            [lr_scheduler.ConstantLR(each, 0.1, 2), lr_scheduler.ExponentialLR(each, 0.5)],
            [2],
        )
    ),
    "plateau": _scheduled(
        lambda each: lr_scheduler.ReduceLROnPlateau(each, patience=0), by_loss=True
    ),
}


def _each(act: Callable[[torch.Tensor], object]) -> Act:
    """Returns what does something to all parameters."""

    def do(run: Run) -> None:
        for each in run.model.parameters():
            act(each)

    return torch.no_grad()(do)


def _each_gradient(act: Callable[[torch.Tensor], object]) -> Act:
    def do(run: Run) -> None:
        for each in run.parameters():
            assert each.grad is not None
            act(each.grad)

    return do


def _centre(gradient: torch.Tensor) -> None:
    if gradient.dim() > 1:
        gradient.sub_(gradient.mean(1, keepdim=True))


def _norm_told(run: Run) -> None:
    run.seen.append(float(nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)))


GRADIENTS = {
    "scaled": Loop(gradients=_each_gradient(lambda each: each.mul_(0.5))),
    "replaced": Loop(gradients=_each_gradient(lambda each: each.copy_(each.sign()))),
    "centred": Loop(gradients=_each_gradient(_centre)),
    "clipped by value": Loop(
        gradients=lambda run: nn.utils.clip_grad_value_(run.model.parameters(), 0.01)
    ),
    "clipped by norm": Loop(gradients=_norm_told),
}


def _averaged(run: Run) -> None:
    means = run.kept.setdefault(
        "means", {name: each.detach().clone() for name, each in run.model.named_parameters()}
    )
    for name, each in run.model.named_parameters():
        means[name].mul_(0.9).add_(each, alpha=0.1)
        if run.number == 2:
            each.copy_(means[name])


def _freeze(run: Run) -> None:
    for name, each in run.model.named_parameters():
        each.requires_grad_(run.number != 1 or "blocks.0" not in name)


def _once(act: Act, number: int = 1) -> Act:
    """Returns what is done after one of the steps."""
    return lambda run: act(run) if run.number == number else None


def _put(name: str, make: Callable[[Any], nn.Module]) -> Act:
    """Returns what puts another module into a model."""

    def do(run: Run) -> None:
        torch.manual_seed(3)
        owner, _, last = name.rpartition(".")
        setattr(run.net.get_submodule(owner), last, make(run.net))

    return _once(do)


def _swap(run: Run) -> None:
    blocks = run.net.blocks
    blocks[0], blocks[1] = blocks[1], blocks[0]


def _tie(run: Run) -> None:
    run.net.blocks[0].linear.weight = run.net.blocks[1].linear.weight


def _hook_for_a_while(run: Run) -> None:
    if run.number == 0:
        handle = run.net.blocks[2].register_forward_hook(lambda module, args, result: result * 1.5)
        run.kept["hook"] = handle
    if run.number == 2:
        run.kept["hook"].remove()


def _scaled_state(run: Run) -> None:
    state = run.model.state_dict()
    run.model.load_state_dict(
        {name: each * 0.9 if each.is_floating_point() else each for name, each in state.items()}
    )


def _rate(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = 0.05 / (run.number + 1)


def _zero_biases(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def _back_to_training(run: Run) -> None:
    run.model.train()
    run.net.norm.eval()


def _hook_of_gradients(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


BETWEEN = {
    "an average put in": Loop(after=torch.no_grad()(_averaged)),
    "weights clamped": Loop(after=_each(lambda each: each.clamp_(-0.2, 0.2))),
    "data clamped": Loop(after=_each(lambda each: each.data.clamp_(-0.2, 0.2))),
    "data scaled": Loop(after=_each(lambda each: each.data.mul_(0.9))),
    "frozen and thawed": Loop(after=_freeze),
    "a block frozen": Loop(after=lambda run: run.net.blocks[1].requires_grad_(run.number % 2 == 0)),
    "the head alone": Loop(
        begin=lambda run: [
            each.requires_grad_("head" in name) for name, each in run.model.named_parameters()
        ]
    ),
    "evaluated in turns": Loop(after=lambda run: run.model.train(run.number % 2 == 1)),
    "statistics kept": Loop(begin=lambda run: run.net.norm.eval(), after=_back_to_training),
    "momentum of statistics": Loop(
        after=lambda run: setattr(run.net.norm, "momentum", 0.5 / (run.number + 1))
    ),
    "a hook for a while": Loop(after=_hook_for_a_while),
    "a hook before": Loop(
        begin=lambda run: run.net.blocks[2].linear.register_forward_pre_hook(
            lambda module, args: (args[0] * 0.5,)
        )
    ),
    "a hook of the backward pass": Loop(
        begin=lambda run: run.net.blocks[2].register_full_backward_hook(
            lambda module, inputs, outputs: (inputs[0] * 0.5,)
        )
    ),
    "hooks of parameters": Loop(
        begin=_each(lambda each: each.register_hook(lambda gradient: gradient * 0.5))
    ),
    "hooks after accumulation": Loop(
        begin=_each(lambda each: each.register_post_accumulate_grad_hook(_hook_of_gradients))
    ),
    "a constant head": Loop(
        after=_once(lambda run: nn.init.constant_(run.net.head.weight.detach(), 0.1))
    ),
    "biases zeroed": Loop(after=_once(lambda run: run.net.apply(_zero_biases))),
    "biases of the model zeroed": Loop(after=_once(lambda run: run.model.apply(_zero_biases))),
    "state loaded again": Loop(after=lambda run: run.model.load_state_dict(run.model.state_dict())),
    "state scaled": Loop(after=_scaled_state),
    "state of the optimizer": Loop(
        after=lambda run: run.optimizer.load_state_dict(run.optimizer.state_dict())
    ),
    "a rate": Loop(after=_rate),
    "another eps": Loop(after=_once(lambda run: setattr(run.net.blocks[1].norm, "eps", 0.01))),
    "forward of a block": Loop(
        after=_once(lambda run: setattr(run.net.blocks[0], "forward", lambda x: x * 2))
    ),
    "swapped blocks": Loop(after=_once(_swap)),
    "a block less": Loop(after=_once(lambda run: run.net.blocks.pop(3))),
    "a block more": Loop(after=_once(lambda run: run.net.blocks.append(nn.Tanh()))),
    "an identity": Loop(after=_put("blocks.1", lambda net: nn.Identity())),
    "another head": Loop(after=_put("head", lambda net: nn.Linear(WIDTH, CLASSES))),
    "tied later": Loop(after=_once(_tie)),
    "a copy": Loop(after=lambda run: copy.deepcopy(run.net)),
    "parameters counted": Loop(
        begin=lambda run: run.seen.append(sum(each.numel() for each in run.net.parameters()))
    ),
}


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, weight: Any) -> Any:
        return weight.triu() + weight.triu(1).T


def _of_blocks(act: Callable[[nn.Module], object]) -> Loop:
    return Loop(prepare=lambda net: [act(block.linear) for block in net.blocks])


PREPARED = {
    "parametrized": _of_blocks(
        lambda each: parametrize.register_parametrization(each, "weight", Symmetric())
    ),
    "weight norm": _of_blocks(parametrizations.weight_norm),
    "weight norm of old": _of_blocks(nn.utils.weight_norm),
    "spectral norm": _of_blocks(parametrizations.spectral_norm),
    "spectral norm of old": _of_blocks(nn.utils.spectral_norm),
    "orthogonal": _of_blocks(parametrizations.orthogonal),
    "pruned": _of_blocks(lambda each: prune.l1_unstructured(each, "weight", 0.3)),
}


def _without_an_optimizer(act: Callable[[list[torch.Tensor]], object]) -> Loop:
    def update(run: Run) -> None:
        act(run.parameters())

    return Loop(clear=lambda run: run.model.zero_grad(), update=torch.no_grad()(update))


def _sgd_by_hand(parameters: list[torch.Tensor]) -> None:
    for each in parameters:
        each.sub_(0.1 * each.grad)


def _sgd_of_data(parameters: list[torch.Tensor]) -> None:
    for each in parameters:
        assert each.grad is not None
        each.data -= 0.1 * each.grad.data


ORDERS = {
    "zeros": Loop(clear=lambda run: run.optimizer.zero_grad(set_to_none=False)),
    "of the model": Loop(clear=lambda run: run.model.zero_grad()),
    "dropped by hand": Loop(clear=_each(lambda each: setattr(each, "grad", None))),
    "two steps an update": Loop(
        clear=lambda run: None if run.number % 2 else run.optimizer.zero_grad(),
        update=lambda run: run.optimizer.step() if run.number % 2 else None,
    ),
    "an update left out": Loop(
        update=lambda run: None if run.number == 1 else run.optimizer.step()
    ),
    "by hand": _without_an_optimizer(_sgd_by_hand),
    "by hand on data": _without_an_optimizer(_sgd_of_data),
    "by hand, foreach": _without_an_optimizer(
        lambda parameters: torch._foreach_add_(
            parameters, [each.grad for each in parameters], alpha=-0.1
        )
    ),
}


def _penalised(model: Any, x: Any, y: Any) -> Any:
    penalty = sum(each.square().sum() for each in model.parameters())
    loss = F.cross_entropy(model(x), y) + 0.01 * penalty
    model.backward(loss)
    return loss


def _in_parts(model: Any, x: Any, y: Any) -> Any:
    logits = model(x)
    loss, size = F.cross_entropy(logits, y, label_smoothing=0.1), logits.square().mean()
    model.backward(loss + 0.1 * size)
    return loss, size, (logits.argmax(-1) == y).float().mean()


def _of_a_list(model: Any, x: Any, y: Any) -> Any:
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    model.backward([loss, logits.square().mean()])
    return loss


def _from_gradients(model: Any, x: Any, y: Any) -> Any:
    logits = model(x)
    model.backward(logits, torch.ones_like(logits) / logits.numel())
    return logits.mean()


def _in_half(model: Any, x: Any, y: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), y)
    model.backward(loss)
    return loss


def _taught_by_itself(model: Any, x: Any, y: Any) -> Any:
    with torch.no_grad():
        wanted = model(x).softmax(-1)
    logits = model(x)
    loss = F.cross_entropy(logits, y) + F.kl_div(logits.log_softmax(-1), wanted, reduction="sum")
    model.backward(loss)
    return loss


def _mixed(model: Any, x: Any, y: Any) -> Any:
    logits = model(0.3 * x + 0.7 * x.flip(0))
    loss = 0.3 * F.cross_entropy(logits, y) + 0.7 * F.cross_entropy(logits, y.flip(0))
    model.backward(loss * logits.detach().std())
    return {"loss": loss, "size": logits.norm()}


BODIES = {
    "penalty": Loop(body=_penalised),
    "in parts": Loop(body=_in_parts),
    "of a list": Loop(body=_of_a_list),
    "from gradients": Loop(body=_from_gradients),
    "in half": Loop(body=_in_half),
    "taught by itself": Loop(body=_taught_by_itself),
    "mixed": Loop(body=_mixed),
}

LOOPS = {
    f"{kind}: {name}": loop
    for kind, loops in (
        ("optimizer", OPTIMIZERS),
        ("schedule", SCHEDULERS),
        ("gradients", GRADIENTS),
        ("between", BETWEEN),
        ("model", PREPARED),
        ("order", ORDERS),
        ("body", BODIES),
    )
    for name, loop in loops.items()
}


def _batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = generator(100 + number)
    x = torch.randn(EXAMPLES, WIDTH, generator=numbers)
    return x, torch.randint(0, CLASSES, (EXAMPLES,), generator=numbers)


def _numbers(result: Any, microbatch: int) -> list[float]:
    """Returns the numbers of one microbatch."""
    parts = list(result.values()) if isinstance(result, dict) else result
    parts = parts if isinstance(parts, list | tuple) else [parts]
    return [
        (each.outputs[microbatch] if isinstance(each, smp.StepOutput) else each).item()
        for each in parts
    ]


def _trained(loop: Loop, run: Run, step: Callable[..., list[list[float]]]) -> Run:
    loop.begin(run)
    for run.number in range(STEPS):
        loop.clear(run)
        run.seen += itertools.chain(*step(*_batch(run.number)))
        loop.gradients(run)
        loop.update(run)
        loop.after(run)
    return run


#: Whether layers share a weight, which several partitions use.
TIES = [False]


def _net(loop: Loop) -> Net:
    torch.manual_seed(1)
    net = Net()
    if TIES[0]:
        net.blocks[-1].linear.weight = net.blocks[0].linear.weight
    loop.prepare(net)
    return net


def _alone(loop: Loop) -> Run:
    model = Alone(net := _net(loop))

    def step(x: Any, y: Any) -> list[list[float]]:
        parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
        return [_numbers(loop.body(model, *part), 0) for part in parts]

    return _trained(loop, Run(net, model, loop.optimizer(model)), step)


#: How tensor parallelism splits a model, where a job has it.
MARKS: dict[str, Any] = {}


def _distributed(loop: Loop) -> Run:
    net = _net(loop)
    if smp.tp_size() > 1:
        smp.set_tensor_parallelism(net, **MARKS)
    model = smp.DistributedModel(net)
    body = smp.step(loop.body)

    def step(x: Any, y: Any) -> list[list[float]]:
        result = body(model, x, y)
        return [_numbers(result, microbatch) for microbatch in range(MICROBATCHES)]

    optimizer = smp.DistributedOptimizer(loop.optimizer(model))
    return _trained(loop, Run(net, model, optimizer), step)


def outcome(loop: Loop) -> str:
    """Runs a loop in this job; returns what became of it; see ``outcome_of``."""
    try:
        wanted = _alone(loop)
    except (RuntimeError, TypeError, BufferError) as error:
        return f"no script: {error}"  # plain PyTorch refuses it, as on a GPU
    state = wanted.model.state_dict()
    try:
        found = _distributed(loop)
        state_found = found.model.state_dict()
        split = is_split(found.model)
    except CommError as error:
        return f"wrong: {error}"
    except SMPError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    for one, other in zip(wanted.seen, found.seen, strict=True):
        if not abs(one - other) <= TOLERANCE * max(1.0, abs(one)):
            return f"wrong: {other} instead of {one}"
    if state.keys() != state_found.keys():
        return f"wrong: state has {state_found.keys() ^ state.keys()} or lacks it"
    for key, each in state.items():
        if not torch.allclose(each.cpu(), state_found[key].cpu(), rtol=TOLERANCE, atol=TOLERANCE):
            return f"wrong: {key} at the end"
    return "exact" if split else "whole"
