"""A population of loops that do one thing with every parameter, its gradient, or both, at a moment.

Long because it is a table of what is done. Each is done before the first step, between a step and
its update, and after the update; what one keeps from a former moment is used at later ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from loops import Loop, Run
from torch import nn
from torch.nn import functional as F

#: Does something with a tensor; returns a number that the script looks at, or nothing.
Act = Callable[[Any], Any]


def _set(tensor: Any, place: Any, value: Any) -> None:
    tensor[place] = value


def _sum_of_list(numbers: Any) -> float:
    return sum(map(_sum_of_list, numbers)) if isinstance(numbers, list) else float(numbers)


def _halved(tensor: Any) -> None:
    tensor *= 0.5


def _rows(tensor: Any) -> Any:
    return tensor.view(tensor.shape[0], -1)


def _foreach(tensor: Any) -> None:
    torch._foreach_mul_([tensor], 0.9)


def _foreach_of_two(tensor: Any) -> None:
    torch._foreach_add_([tensor], [torch.ones(tensor.shape)], alpha=0.01)


IN_PLACE: dict[str, Act] = {
    "mul_": lambda t: t.mul_(0.9),
    "augmented": _halved,
    "add_": lambda t: t.add_(0.01),
    "clamp_": lambda t: t.clamp_(-0.1, 0.1),
    "zero_": lambda t: t.zero_(),
    "rows by their norms": lambda t: t.div_(
        _rows(t).norm(dim=1).view(-1, *[1] * (t.dim() - 1)) + 1
    ),
    "centred": lambda t: t.sub_(t.mean()),
    "copy_": lambda t: t.copy_(t.flip(0) * 0.9),
    "first row": lambda t: _set(t, 0, 0.1),
    "last row": lambda t: t[-1].fill_(0.2),
    "columns": lambda t: t[..., ::2].mul_(0.5),
    "masked_fill_": lambda t: t.masked_fill_(t > 0.1, 0.1),
    "by a mask": lambda t: _set(t, t.abs() < 0.1, 0.0),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([0, 2]), 0.3),
    "lerp_": lambda t: t.lerp_(torch.ones(t.shape), 0.01),
    "addcmul_": lambda t: t.addcmul_(t, t, value=0.1),
    "sign_": lambda t: t.sign_().mul_(0.01),
    "by a number of it": lambda t: t.mul_(1 / (1 + t.norm())),
    "out": lambda t: torch.mul(t, 0.9, out=t),
    "renorm_": lambda t: t.view(-1, 1).renorm_(2, 0, 0.2),
    "where": lambda t: t.copy_(torch.where(t > 0, t, 0.1 * t)),
    "init": lambda t: nn.init.constant_(t, 0.05),
    "nan_to_num_": lambda t: t.nan_to_num_(0.0).clamp_(min=-0.2),
}
READ: dict[str, Act] = {
    "norm": lambda t: t.norm(),
    "norms of rows": lambda t: _rows(t).norm(dim=1).max(),
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t.abs().mean()),
    "element": lambda t: t.view(-1)[-1],
    "tolist": lambda t: _sum_of_list(t.tolist()),
    "isfinite": lambda t: torch.isfinite(t).all(),
    "histogram": lambda t: torch.histc(t.detach(), 5, -1, 1)[2],
    "quantile": lambda t: torch.quantile(t.detach(), 0.3),
    "topk": lambda t: t.flatten().topk(2).values.sum(),
    "numpy": lambda t: t.detach().cpu().numpy().sum(),
    "equal": lambda t: torch.equal(t, t.clone()),
    "comparison": lambda t: (t > 0).sum(),
    "iterated": lambda t: sum(float(each.sum()) for each in t),
    "stacked": lambda t: torch.stack([t, t * 2]).std(),
    "concatenated": lambda t: torch.cat([t.flatten(), torch.ones(3)]).mean(),
    "unbound": lambda t: t.unbind(0)[-1].sum(),
    "by format": lambda t: float(f"{t.sum():.4f}"),
    "softmax": lambda t: F.softmax(t.flatten(), 0).max(),
    "one by one": lambda t: torch.linalg.vector_norm(t, ord=float("inf")),
    "copied": lambda t: t.detach().clone().mul_(2).sum(),
    "double": lambda t: t.double().square().sum(),
}
BY_ALIAS: dict[str, Act] = {
    "data": lambda t: t.data.mul_(0.9),
    "data of rows": lambda t: t.data[0].zero_(),
    "detached": lambda t: t.detach().clamp_(-0.1, 0.1),
    "view": lambda t: t.view(-1)[1:].mul_(0.5),
    "transposed": lambda t: t.detach().t().mul_(0.5) if t.dim() == 2 else None,
    "chunks": lambda t: sum(each.mul_(0.5).sum() for each in t.chunk(2)),
    "unbound": lambda t: t.unbind(0)[0].fill_(0.1),
    "rows in turn": lambda t: sum(each.div_(1 + each.norm()).sum() for each in t),
    "narrow": lambda t: t.narrow(0, 1, 1).add_(0.1),
    "reshaped": lambda t: t.reshape(-1).clamp_(max=0.1),
    "assigned data": lambda t: setattr(t, "data", t.data * 0.9),
    "foreach": _foreach,
    "foreach norm": lambda t: torch._foreach_norm([t, t * 2])[1],
    "foreach of two": _foreach_of_two,
}


def _agc(p: Any, g: Any) -> None:
    bound = _rows(p).norm(dim=1).clamp(min=1e-3) * 0.01
    norm = _rows(g).norm(dim=1).clamp(min=1e-6)
    g.mul_((bound / norm).clamp(max=1.0).view(-1, *[1] * (g.dim() - 1)))


def _assigned(p: Any, g: Any) -> Any:
    p.grad = made = g * 0.5 + p.detach() * 0.01
    made.mul_(0.5)  # it is the gradient now
    return p.grad.sum()


def _foreach_both(p: Any, g: Any) -> None:
    torch._foreach_addcdiv_([p], [g], [g.abs() + 1], value=-0.01)


BOTH: dict[str, Callable[[Any, Any], Any]] = {
    "agc": _agc,
    "decayed": lambda p, g: g.add_(p, alpha=0.01),
    "by hand": lambda p, g: p.sub_(g, alpha=0.01),
    "by data": lambda p, g: p.data.add_(g.data, alpha=-0.01),
    "by sign": lambda p, g: p.add_(torch.sign(g), alpha=-0.01),
    "product": lambda p, g: (p * g).sum(),
    "angle": lambda p, g: F.cosine_similarity(p.flatten(), g.flatten(), 0),
    "copied": lambda p, g: g.copy_(p * 0.01),
    "projected": lambda p, g: g.sub_(p * ((p * g).sum() / (p.square().sum() + 1))),
    "foreach": _foreach_both,
    "assigned": _assigned,
    "clip_grad_value_": lambda p, g: nn.utils.clip_grad_value_([p], 0.01),
}
#: Of a tensor that the script has from the first moment on, and of the parameter or gradient.
STATES: dict[str, Callable[[Any, Any], Any]] = {
    "lerp_": lambda s, t: s.lerp_(t, 0.1),
    "add_": lambda s, t: s.mul_(0.9).add_(t, alpha=0.1),
    "copy_": lambda s, t: s.copy_(t),
    "out": lambda s, t: torch.add(s, t, out=s),
    "foreach": lambda s, t: torch._foreach_lerp_([s], [t], 0.1),
    "rows": lambda s, t: s[0].copy_(t[0]),
    "addcmul_": lambda s, t: s.mul_(0.9).addcmul_(t, t, value=0.1),
    "put back": lambda s, t: (s.lerp_(t, 0.5), t.copy_(s))[0].sum(),
    "data put back": lambda s, t: (s.data.lerp_(t.data, 0.5), t.data.copy_(s.data))[0].sum(),
}


def _told(run: Run, number: Any) -> None:
    if isinstance(number, torch.Tensor):
        number = number.double().sum().item() if number.numel() else 0.0
    if number is not None:
        run.seen.append(_sum_of_list(list(number)) if isinstance(number, tuple) else float(number))


def _of_each(what: str, act: Act) -> Callable[[Run], None]:
    def do(run: Run) -> None:
        for each in run.net.parameters():
            tensor = each if what == "parameter" else each.grad
            if tensor is not None:
                _told(run, act(tensor))

    return torch.no_grad()(do)


def _of_both(act: Callable[[Any, Any], Any]) -> Callable[[Run], None]:
    def do(run: Run) -> None:
        for each in run.net.parameters():
            _told(run, act(each, each.grad))

    return torch.no_grad()(do)


def _with_states(what: str, act: Callable[[Any, Any], Any]) -> Callable[[Run], None]:
    def do(run: Run) -> None:
        states = run.kept.setdefault("states", {})
        for name, each in run.net.named_parameters():
            tensor = each if what == "parameter" else each.grad
            if tensor is not None:
                if name not in states:
                    states[name] = torch.full(tensor.shape, 0.1)
                act(states[name], tensor)
                run.seen.append(float(states[name].sum()))

    return torch.no_grad()(do)


# What is kept shows what the parameter has become, as it sees its memory.


def _kept(see: Act) -> Loop:
    def begin(run: Run) -> None:
        run.kept["views"] = [see(each) for each in run.net.parameters()]

    def after(run: Run) -> None:
        run.seen.append(float(sum(each.sum() for each in run.kept["views"])))
        for each in run.kept["views"]:
            each.mul_(0.9)

    return Loop(begin=torch.no_grad()(begin), after=torch.no_grad()(after))


def _exchanged(run: Run) -> None:
    """The averages are put in, looked at, and taken out again."""
    averages = run.kept.setdefault("averages", {})
    parameters = list(run.net.named_parameters())
    for name, each in parameters:
        former = averages.get(name, torch.zeros(each.shape))
        averages[name] = (0.5 * former + 0.5 * each.data).clone()
    backup = {name: each.data for name, each in parameters}
    for name, each in parameters:
        each.data = averages[name]
    run.seen.append(float(sum(each.abs().sum() for _, each in parameters)))
    for name, each in parameters:
        each.data = backup[name]


def _ascended(run: Run) -> None:
    """As in sharpness-aware minimisation, without its second pass."""
    norm = torch.stack([each.grad.norm() for each in run.net.parameters()]).norm()
    steps = [each.grad * (0.05 / (norm + 1e-12)) for each in run.net.parameters()]
    for each, step in zip(run.net.parameters(), steps, strict=True):
        each.add_(step)
        run.seen.append(float(each.sum()))
        each.sub_(step)


def _penalised(run: Run) -> None:
    """A loss of parameters alone, differentiated between two steps."""
    sum(each.square().sum() for each in run.net.parameters()).mul(0.01).backward()


def _asked(run: Run) -> None:
    weight = run.net.first.weight
    (gradient,) = torch.autograd.grad(weight.square().sum(), weight)
    run.seen.append(float(gradient.norm()))


def _in_inference(run: Run) -> None:
    with torch.inference_mode():
        for each in run.net.parameters():
            each.mul_(0.9)
            each.data.add_(0.01)
            run.seen.append(float(each.norm()))


def _momentum_by_hand(run: Run) -> None:
    """An optimizer that a script writes itself, of the sign of a momentum."""
    for name, each in run.net.named_parameters():
        momentum = run.kept.setdefault(name, torch.zeros_like(each))
        each.mul_(0.99).add_(torch.sign(momentum * 0.9 + each.grad * 0.1), alpha=-0.01)
        momentum.lerp_(each.grad, 0.1)


def _followed(run: Run) -> None:
    """Blocks of all partitions follow the last one, by new data."""
    *blocks, last = run.net.blocks
    for block in blocks:
        for mine, its in zip(block.parameters(), last.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * its.data


ALONE: dict[str, Loop] = {
    "kept: data": _kept(lambda p: p.data),
    "kept: detached": _kept(lambda p: p.detach()),
    "kept: rows": _kept(lambda p: p[0]),
    "kept: flat": _kept(lambda p: p.view(-1)),
    "kept: of a state": Loop(
        begin=lambda run: run.kept.update(state=run.net.state_dict(keep_vars=False)),
        after=lambda run: run.seen.append(
            float(sum(each.float().sum() for each in run.kept["state"].values()))
        ),
    ),
    "averages put in": Loop(after=torch.no_grad()(_exchanged)),
    "ascended": Loop(gradients=torch.no_grad()(_ascended)),
    "penalised": Loop(gradients=_penalised),
    "penalised before": Loop(begin=_penalised, clear=lambda run: None),
    "asked for": Loop(gradients=_asked),
    "in inference mode": Loop(after=_in_inference),
    "followed by data": Loop(after=_followed),
    "momentum by hand": Loop(update=torch.no_grad()(_momentum_by_hand)),
}
MOMENTS = {
    "before": lambda act: Loop(begin=act),
    "between": lambda act: Loop(gradients=act),
    "after": lambda act: Loop(after=act),
}


def _acts() -> dict[str, Callable[[Run], None]]:
    whats = ("parameter", "gradient")
    found = {
        f"{kind}: {name} of each {what}": _of_each(what, act)
        for kind, acts in (("in place", IN_PLACE), ("read", READ), ("alias", BY_ALIAS))
        for (name, act), what in itertools.product(acts.items(), whats)
    }
    found |= {f"both: {name}": _of_both(act) for name, act in BOTH.items()}
    return found | {
        f"state: {name} of each {what}": _with_states(what, act)
        for (name, act), what in itertools.product(STATES.items(), whats)
    }


ACTS = {
    **{
        f"{moment}: {name}": make(act)
        for (name, act), (moment, make) in itertools.product(_acts().items(), MOMENTS.items())
        if moment != "before" or name.endswith("parameter")
    },
    **ALONE,
}
