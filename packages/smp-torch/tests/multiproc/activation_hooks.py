"""Small scripts that look at gradients of activations, and change them; see ``small_scripts``.

By hooks on what code between modules has, ``retain_grad``, ``grad`` of inputs, hooks of modules
wherever they are, and what forward hooks put on results. What is refused is refused for a reason.
"""

from __future__ import annotations

from functools import partial

from small_scripts import outcome_of

_SCRIPT = """
import torch
from torch import nn

LOG, KEPT = [], {{}}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.fourth = (Block() for _ in range(4))

    def forward(self, x):
        first = self.first(x)
        second = self.second(first)
        {between}
        found = self.fourth(self.third(second))
        {behind}
        return found

def built(net):
    {built}

def body(model, x, y):
    net = NET
    {before}
    found = model(x)
    {body}
    loss = (found - y).square().mean()
    model.backward(loss)
    {after}
    return loss
"""

_ON_MODULES = """
    def keep(name):
        def hook(module, given, made):
            KEPT[name] = made[0]
            module.norm = made[0].norm()
            LOG.append((name, made[0].shape))
        return hook
    net.register_full_backward_hook(keep("net"))
    net.first.up.register_full_backward_hook(keep("inner"))
    net.fourth.register_full_backward_hook(keep("fourth"))
    net.second.register_full_backward_hook(lambda _, given, made: (given[0] + made[0].mean(),))
    net.third.register_full_backward_pre_hook(lambda _, made: (made[0] * 3,))
"""

_BY_FORWARD_HOOKS = """
    def put(module, given, made):
        made.register_hook(lambda gradient: KEPT.__setitem__("gradient", gradient))
        made.retain_grad()
        KEPT["made"] = made
    net.first.down.register_forward_hook(put)
    net.fourth.register_forward_hook(lambda module, given, made: made.register_hook(
        lambda gradient: setattr(module, "seen", gradient.abs()) or gradient * 2) and None)
"""

#: Exact.
HOOKED = {
    "changed": {
        "between": """
        kept = first.detach()
        taken_off = second.register_hook(lambda gradient: gradient * 100)
        second.register_hook(lambda gradient: gradient * (kept > 0))
        second.register_hook(lambda gradient: gradient.mul_(self.second.down.weight.norm()))
        second.register_hook(lambda gradient: gradient.__setitem__((slice(None), 0), 0.0))
        taken_off.remove()""",
        "behind": "found.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))",
        "body": """
    found = found * 2 if found.norm() > 1 else found
    assert str(found.detach().mean()).startswith("tensor(")""",
    },
    "kept": {
        "before": "x = x.clone().requires_grad_()",
        "between": """
        second.retain_grad()
        second.register_hook(lambda gradient: LOG.append(gradient.norm().item()))
        first.register_hook(lambda gradient: gradient * (1 + len(LOG) % 3))
        self.second_made, self.found = second, None""",
        "behind": "found.retain_grad(); self.found = found",
        # Of one partition, of two, and a number that is known when the step has run.
        "after": """
    gradients = net.second_made.grad, net.found.grad
    assert found.grad is gradients[1] and LOG[-1] is not None
    loss = loss + x.grad.norm() + (gradients[0] * gradients[1] * net.found).sum()""",
    },
    "of modules": {
        "built": _ON_MODULES,
        "after": """
    assert [name for name, _ in LOG[-3:]] == ["net", "fourth", "inner"]
    loss = loss + sum(each.norm() for each in KEPT.values()) + net.first.up.norm""",
    },
    "by forward hooks": {
        "built": _BY_FORWARD_HOOKS,
        "after": """
    assert KEPT["made"].grad.shape == KEPT["gradient"].shape
    loss = loss + KEPT["gradient"].norm() + KEPT["made"].grad.mean() + net.fourth.seen.mean()""",
    },
    "asked for": {
        "built": """
    def check(module, given, made):
        assert torch.isfinite(made[0]).all()
    for each in net.modules():
        if isinstance(each, nn.Linear): each.register_full_backward_hook(check)""",
    },
    "computed on": {
        "before": "x = x.clone().requires_grad_()",
        "after": "model.backward(model((x + x.grad).detach()).sum())",
    },
}
_DOUBLE = "second.register_hook(lambda gradient: gradient * 2)"
#: Refused -> a part of the reason.
REFUSED = {
    "asked for between": (
        {"behind": "found.register_hook(lambda gradient: LOG.append(bool(gradient.any())))"},
        "it is a gradient, or computed from one",
    ),
    "of what is elsewhere": (
        {
            "between": "second.register_hook("
            "lambda gradient: gradient * self.fourth.down.weight.norm())"
        },
        "which is not there when the backward pass comes to it",
    ),
    "of two backward passes": (
        {"between": _DOUBLE, "body": "model.backward([found.mean(), found.mean()]); return found"},
        "call model.backward once",
    ),
    "of several tensors": (
        {"between": "torch.autograd.graph.register_multi_grad_hook([first, second], LOG.append)"},
        "Put a hook on each tensor",
    ),
}
_HOLES = ("between", "behind", "built", "before", "body", "after")


def _outcome(parts: dict[str, str]) -> str:
    script = _SCRIPT.format(**{**dict.fromkeys(_HOLES, "pass"), **parts})
    return outcome_of(script, lambda *_: None)


#: Name -> runs it in this job, and returns what became of it.
SCRIPTS = {
    name: partial(_outcome, parts)
    for name, parts in {
        **HOOKED,
        **{name: parts for name, (parts, _) in REFUSED.items()},
    }.items()
}
