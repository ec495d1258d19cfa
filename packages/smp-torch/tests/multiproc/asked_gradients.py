"""Small scripts that ask for gradients in the forward pass; see ``small_scripts``.

Each asks for something by ``torch.autograd.grad`` (an adversarial example, a penalty, a map), of a
network of some kind, somewhere: in the step, in the forward of the model, in some microbatches
alone, or in a step that does not train. Others take it from ``x.grad``, behind a ``backward`` of
the same step, and go on with it.
"""

from __future__ import annotations

import itertools
from functools import partial

from small_scripts import outcome_of

_SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CALLS = []

class Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        {layer}

    def forward(self, x):
        h = self.up(x)
        {inside}
        return x + self.down(torch.tanh(h))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.fourth = (Block() for _ in range(4))
        {made}

    def run(self, x, scale=None):
        first = self.first(x)
        second = self.second(first)
        {between}
        third = self.third(second if scale is None else second * scale)
        return self.fourth(third)

    def forward(self, x, scale=None, y=None):
        return self.run(x, scale) if y is None else ask(self, self.run, x, y)

def built(net):
    {built}

def ask(net, run, x, y):
    {ask}
    return loss

def body(model, x, y):
    net = NET
    {body}
    return loss
"""

#: What is asked, of ``run``; gives a loss.
ASKED = {
    "signs": """
    x = x.clone().requires_grad_()
    slope, = torch.autograd.grad((run(x) - y).square().mean(), x)
    loss = (run((x + 0.1 * slope.sign()).detach()) - y).square().mean()""",
    "beside the clean loss": """
    x.requires_grad_()
    clean = (run(x) - y).square().mean()
    slope, = torch.autograd.grad(clean, [x], retain_graph=True)
    loss = clean + (run((x + 0.1 * slope).detach()) - y).square().mean()""",
    "several rounds": """
    found = x + 0.01 * y
    for _ in range(3):
        found = found.detach().requires_grad_()
        slope, = torch.autograd.grad((run(found) - y).square().mean(), [found])
        found = found + 0.05 * slope.sign()
        found = torch.min(torch.max(found, x - 0.1), x + 0.1)
    loss = (run(found.detach()) - y).square().mean()""",
    "virtual": """
    with torch.no_grad():
        wanted = F.softmax(run(x), dim=1)
    change = F.normalize(y).requires_grad_()
    found = F.log_softmax(run(x + 0.1 * change), dim=1)
    change, = torch.autograd.grad(F.kl_div(found, wanted, reduction="batchmean"), change)
    found = F.log_softmax(run(x + F.normalize(change)), dim=1)
    loss = (run(x) - y).square().mean() + F.kl_div(found, wanted, reduction="batchmean")""",
    "penalty": """
    x = x.clone().requires_grad_()
    out = run(x)
    slope, = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = (out - y).square().mean() + slope.square().sum(1).mean()""",
    "penalty between": """
    mixed = torch.lerp(x, y, 0.3).requires_grad_()
    out = run(mixed)
    slope = torch.autograd.grad(
        outputs=out, inputs=mixed, grad_outputs=torch.ones_like(out),
        create_graph=True, retain_graph=True, only_inputs=True)[0]
    loss = run(x).mean() - run(y).mean() + ((slope.norm(2, dim=1) - 1) ** 2).mean()""",
    "map": """
    x = x.clone().requires_grad_()
    out = run(x)
    slope, = torch.autograd.grad(out.amax(1).sum(), x, retain_graph=True)
    loss = (out - y).square().mean() + (slope * x.detach()).abs().mean()""",
    "activations": """
    h = net.second(net.first(x))
    out = net.fourth(net.third(h))
    of_h, of_out = torch.autograd.grad((out * y).sum() + h.mean(), (h, out), create_graph=True)
    of_h.mul_(0.5)
    loss = (net.fourth(net.third(h + 0.1 * of_h)) - y + 0.1 * of_out).square().mean()""",
    "weights": """
    loss = (run(x) - y).square().mean()
    slopes = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    loss = loss + 0.1 * sum(each.square().sum() for each in slopes)""",
    "matched": """
    wanted = torch.autograd.grad((run(x) - y).square().mean(), list(net.parameters()))
    made = (x * 0.5).requires_grad_()
    found = torch.autograd.grad(
        (run(made) - y).square().mean(), list(net.parameters()), create_graph=True)
    apart = sum((a.detach() - b).square().sum() for a, b in zip(wanted, found))
    slope, = torch.autograd.grad(apart, made)
    loss = (run(made.detach() - 0.01 * slope) - y).square().mean()""",
    "two inputs": """
    x, scale, unused = (each.clone().requires_grad_() for each in (x, y, y))
    out = run(x, scale)
    of_x, of_scale, nothing = torch.autograd.grad(
        out.square().sum(), (x, scale, unused), create_graph=True, allow_unused=True)
    assert nothing is None
    loss = (out - y).square().mean() + 0.1 * of_x.norm() + (of_scale * scale).mean()""",
    "of gradients": """
    x = x.clone().requires_grad_()
    out = run(x)
    slope, = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    curve, = torch.autograd.grad(slope, x, y, create_graph=True, materialize_grads=True)
    loss = (out - y).square().mean() + 0.01 * curve.square().mean()""",
    "one by one": """
    x = x.clone().requires_grad_()
    out = run(x)
    rows = [torch.autograd.grad(out[:, i].sum(), x, create_graph=True)[0] for i in range(2)]
    loss = (out - y).square().mean() + torch.stack(rows).square().mean()""",
    "product": """
    value, found = torch.autograd.functional.hvp(lambda t: run(t).square().sum(), x, y)
    loss = (run(x + 0.01 * found) - y).square().mean()""",
}
#: What the network has; the last ones are refused.
NETWORKS: dict[str, dict[str, str]] = {
    "maps": {},
    "statistics": {"layer": "self.norm = nn.BatchNorm1d(8, eps=1.0)", "inside": "h = self.norm(h)"},
    "evaluated": {
        "layer": "self.norm = nn.BatchNorm1d(8)",
        "inside": "h = self.norm(h)",
        "built": "net.eval()",
    },
    "tied": {"made": "self.fourth.up.weight = self.first.up.weight"},
    "reparametrized": {"layer": "nn.utils.parametrizations.weight_norm(self.up)"},
    "in place inside": {"inside": "h = F.relu(h, inplace=True)"},
    "in place between": {"between": "second += first; F.relu_(second)"},
    "in place behind a cut": {"made": "self.third = nn.Sequential(nn.ReLU(True), nn.Linear(4, 4))"},
    "decides": {"inside": "h = h * 2 if x.sum() > 0 else h"},
    "own function": {"between": "second = Flipped.apply(second)"},
    "parameter between": {
        "made": "self.scale = nn.Parameter(torch.ones(4))",
        "between": "second = F.linear(second * self.scale, self.first.up.weight[:4])",
    },
    "checkpointed": {
        "between": "second = checkpoint(self.second, second, use_reentrant=False)",
    },
    "partly frozen": {"built": "net.third.requires_grad_(False); net.first.down.bias.grad = None"},
    "counts": {"layer": "self.count = 0", "inside": "self.count += 1"},
    "hooked": {"between": "second.requires_grad and second.register_hook(lambda g: g * 2)"},
    "power iterated": {"layer": "nn.utils.parametrizations.spectral_norm(self.up)"},
}
#: What is taken from ``.grad``, and what becomes of it.
TAKEN = {
    "signs": """
    x = x.detach().requires_grad_(True)
    clean = (model(x) - y).square().mean()
    model.backward(clean)
    loss = (model((x + 0.1 * x.grad.sign()).detach()) - y).square().mean()
    model.backward(loss)""",
    "of the argument": """
    x.requires_grad_()
    clean = (model(x) - y).square().mean()
    model.backward(clean)
    slope = x.grad.data
    loss = clean + (model(x + 0.1 * slope / slope.norm(dim=1, keepdim=True)) - y).square().mean()
    model.backward((model(x + 0.1 * slope.sign()) - y).square().mean())""",
    "rounds": """
    found = x + 0.01 * y
    for _ in range(3):
        found = found.detach().requires_grad_()
        loss = (model(found) - y).square().mean() / 3
        model.backward(loss)
        found = torch.min(torch.max(found + 0.05 * found.grad.sign(), x - 0.1), x + 0.1)""",
    "free": """
    change = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        loss = (model(x + change) - y).square().mean() / 3
        model.backward(loss)
        with torch.no_grad():
            change.add_(0.1 * change.grad.sign())
        change.grad.zero_()""",
    "by data": """
    change = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        loss = (model(x + change) - y).square().mean() / 3
        model.backward(loss)
        change.data.add_(change.grad, alpha=2.0).clamp_(-0.1, 0.1)
        change.grad = None""",
    "put away": """
    x = x.clone().requires_grad_()
    for _ in range(2):
        loss = (model(x) - y).square().mean()
        model.backward(loss)
        slope = x.grad
        x.grad = None
    loss = (model(x.detach() - slope) - y).square().mean()
    model.backward(loss)""",
    "added up": """
    x = x.clone().requires_grad_()
    model.backward((model(x) - y).square().mean())
    slope = x.grad
    first = slope.clone()
    model.backward(model(x + slope).abs().mean())
    assert slope is x.grad
    loss = (model(x.detach() - x.grad + 0.1 * slope + first) - y).square().mean()
    model.backward(loss)""",
    "of both": """
    x = x.clone().requires_grad_()
    model.backward((model(x) - y).square().mean())
    model.backward(model(x).abs().mean())
    loss = (model((x - x.grad).detach()) - y).square().mean()
    model.backward(loss)""",
    "at the end": """
    x = x.clone().requires_grad_()
    model.backward((model(x) - y).square().mean())
    slope = x.grad
    model.backward(model(x).abs().mean())
    loss = slope.abs().mean()""",
    "retained": """
    h = net.second(net.first(x))
    h.retain_grad()
    model.backward((net.fourth(net.third(h)) - y).square().mean())
    loss = (net.fourth(net.third(h.detach() + h.grad)) - y).square().mean()
    model.backward(loss)""",
    "view": """
    x = x.clone().requires_grad_()
    model.backward((model(x) - y).square().mean())
    slope = x.grad.data
    model.backward(model(x + slope).abs().mean())
    loss = (model(x.detach() - slope) - y).square().mean()""",
    "asked about": """
    x = x.clone().requires_grad_()
    model.backward((model(x) - y).square().mean())
    loss = (model(x.detach() * (2 if x.grad.norm() > 0.1 else 1)) - y).square().mean()""",
}
_TRAINS = "\n    model.backward(loss)"
#: Where it is asked.
MOMENTS = {
    "step": f"loss = ask(net, model, x, y){_TRAINS}",
    "forward": f"loss = model(x, None, y){_TRAINS}",
    "at times": f"""
    CALLS.append(1)
    loss = ask(net, model, x, y) if len(CALLS) % 3 else model(x).square().mean(){_TRAINS}""",
    "without training": "loss = ask(net, model, x, y)",
}
_HOLES = dict.fromkeys(("layer", "inside", "made", "between", "built"), "pass")


def script_of(asked: str, network: str, moment: str) -> str:
    """Returns a script.

    Args:
        asked: what is.
        network: of which kind.
        moment: where.
    """
    holes = {**_HOLES, **NETWORKS[network]}
    return _SCRIPT.format(ask=ASKED[asked], body=MOMENTS[moment], **holes)


def _outcome(*names: str) -> str:
    return outcome_of(script_of(*names), lambda *_: None)


def _outcome_of_taken(taken: str, network: str) -> str:
    script = _SCRIPT.format(ask="loss = x", body=TAKEN[taken], **{**_HOLES, **NETWORKS[network]})
    return outcome_of(script, lambda *_: None)


#: Name -> runs it in this job, and returns what became of it.
SCRIPTS = {
    ", ".join(names): partial(_outcome, *names)
    for names in itertools.product(ASKED, NETWORKS, MOMENTS)
}
SCRIPTS |= {
    f"{taken}, taken, {network}": partial(_outcome_of_taken, taken, network)
    for taken, network in itertools.product(TAKEN, NETWORKS)
}
#: Refused -> a part of the reason.
REFUSED = {
    "penalty, counts, step": "which changes state in its forward",
    "map, hooked, step": "comes to an activation that has a hook",
    "view, taken, maps": "computes with a view of a gradient",
    "asked about, taken, maps": "it is a gradient",
}
