"""A population of scripts whose forward hooks store what they compute from activations.

Each has a kind of what is stored (a number, a text, a sum, a histogram, a running maximum, an
attribute), a place (the module that has the hook: whole, inside one that is whole, split) and a
moment at which it is read: after the step, in the step, in the forward of the model, by the next
step, with what was stored before. What is stored is compared on every rank.
"""

from __future__ import annotations

import itertools
from functools import partial

from small_scripts import outcome_of

#: What a hook does with ``out``, by the name of the module that it is on.
KINDS = {
    "number": "LOG.append(out.norm().item())",
    "named number": "LOG.append((name, out.std().item()))",
    "float": "LOG.append(float(out.mean()))",
    "text": "LOG.append(f'{name}: {out.mean().item():.3f}')",
    "list of numbers": "LOG.append(out.mean(0).tolist())",
    "array": "LOG.append(out.detach().numpy().copy())",
    "tensor": "LOG.append(out.detach().abs().mean())",
    "named tensor": "LOG.append((name, out.detach().abs().mean()))",
    "itself": "LOG.append(out)",
    "what it is given": "LOG.append((name, given[0].detach()))",
    "with its gradient": "LOG.append({name: out.abs().mean()})",
    "shape": "LOG.append(tuple(out.shape))",
    "dead": "STATS[name] = (out > 0).float().mean().item()",
    "sum": "STATS[name] = STATS.get(name, 0.0) + out.abs().mean().item()",
    "sum of tensors": "STATS[name] = STATS.get(name, 0.0) + out.detach().abs().mean()",
    "added to zero": "ZERO[name] += out.detach().square().mean().item()",
    "lists": "STATS.setdefault(name, []).append(out.mean().item())",
    "histogram": "LOG.append(torch.histc(out.detach(), 4, -1.0, 1.0))",
    "maximum": "STATS[name] = max(STATS.get(name, -9.0), out.max().item())",
    "counter": "STATS[name] = STATS.get(name, 0) + 1",
    "if": "out.mean() > 0 and LOG.append((name, out.min().item()))",
    "assertion": "assert torch.isfinite(out).all(); LOG.append(len(out))",
    "attribute": "module.seen = out.norm().item()",
    "tensor in an attribute": "module.seen = out.detach().norm()",
    "average": "module.seen = 0.9 * getattr(module, 'seen', 0.0) + 0.1 * out.mean().item()",
    "object": "METER.add(out.mean().item(), len(out))",
    "scalar": "WRITER.add_scalar(f'{name}/mean', out.mean().item(), len(WRITER.rows))",
    "global": "globals().__setitem__('TOTAL', TOTAL + out.sum().item())",
}
#: The modules that have the hook.
PLACES = {
    "layer": "[('first', net.first)]",
    "inner": "[('inner', net.first.inner)]",
    "linears": "[(n, m) for n, m in net.named_modules() if isinstance(m, nn.Linear)]",
    "split": "[('blocks', net.blocks)]",
    "every": "list(net.named_modules())",
    "before": "[('inner', net.first.inner), ('later', net.later)]",
    "overwritten": "[('up', net.third.up)]",
    "twice": "[('again', net.again)]",
}
_FORGET = "LOG.clear(); STATS.clear(); WRITER.rows.clear(); METER.__init__(); forget()"
#: What reads it: the holes of the script that it fills.
MOMENTS = {
    "after": {},
    "of the last": {"start": _FORGET},
    "step": {"start": _FORGET, "step": "found = found + 0.1 * total(state(net))"},
    "loss": {"start": _FORGET, "loss": "loss = loss + 0.1 * total(state(net))"},
    "model": {"start": _FORGET, "model": "x = x * (1 + 0.01 * total(state(self)))"},
    "next step": {"start": "x = x + 0.01 * FORMER"},
    "all before": {"loss": "loss = loss + 0.1 * total(state(net))"},
}
_SCRIPT = """
import torch
from torch import nn

LOG, STATS, ZERO, TOTAL, FORMER = [], {{}}, {{}}, 0.0, 0.0

class Meter:
    def __init__(self): self.sum, self.count = 0.0, 0
    def add(self, value, count):
        self.sum += value * count
        self.count += count

class Writer:
    def __init__(self): self.rows = []
    def add_scalar(self, tag, value, number): self.rows.append((tag, value, number))

METER, WRITER = Meter(), Writer()

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.inner(x)) * 2

class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu_(self.up(x)) + x

class Again(nn.Linear):
    pass

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.third, self.again = Layer(), Overwriting(), Again(4, 4)
        self.blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.later = nn.Linear(4, 4)

    def forward(self, x):
        x = self.third(self.again(self.again(self.first(x))))
        {model}
        return self.later(self.blocks(x).tanh())

def state(net):
    kept = [each.seen for each in net.modules() if hasattr(each, "seen")]
    return [LOG, STATS, ZERO, TOTAL, METER.sum, METER.count, WRITER.rows, kept]

def flat(content, detach=False):
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, (list, tuple)):
        for each in content:
            yield from flat(each, detach)
    else:
        yield content.detach() if isinstance(content, torch.Tensor) and detach else content

def total(content):
    numbers = (each for each in flat(content) if not isinstance(each, str))
    return sum(each if isinstance(each, (int, float)) else each.sum()
        if hasattr(each, "sum") and hasattr(each, "shape") else each for each in numbers)

def forget():
    global TOTAL
    TOTAL = 0.0
    ZERO.update(dict.fromkeys(ZERO, 0.0))

def kept():
    return list(flat(state(NET), True))

def around_steps():
    global FORMER
    FORMER = min(5.0, abs(float(total(state(NET)))))

def built(net):
    hooked = {place}
    ZERO.update((name, 0.0) for name, _ in hooked)
    def on(name):
        def hook(module, given, {made}):
            {kind}
        return hook
    for name, module in hooked:
        module.register_forward_{pre}hook(on(name))

def body(model, x, y):
    net = NET
    {start}
    found = model(x)
    {step}
    loss = (found - y).square().mean()
    {loss}
    model.backward(loss)
    return loss
"""


def script_of(kind: str, place: str, moment: str) -> str:
    """Returns a script."""
    holes = {**dict.fromkeys(("model", "start", "step", "loss"), "pass"), **MOMENTS[moment]}
    is_pre = place == "before"
    did = KINDS[kind].replace("out", "given[0]") if is_pre else KINDS[kind]
    made = "_=None" if is_pre else "out"
    pre = "pre_" if is_pre else ""
    return _SCRIPT.format(kind=did, place=PLACES[place], made=made, pre=pre, **holes)


def _former(names: dict[str, object], *_: object) -> None:
    names["around_steps"]()  # type: ignore[operator]


def _outcome(kind: str, place: str, moment: str) -> str:
    return outcome_of(script_of(kind, place, moment), _former)


#: Name -> runs it in this job, and returns what became of it.
DERIVED = {
    ", ".join(each): partial(_outcome, *each) for each in itertools.product(KINDS, PLACES, MOMENTS)
}
