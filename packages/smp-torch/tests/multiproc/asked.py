"""A population of scripts whose Python asks for the values of activations.

Each is a question (a branch, a length, a number, a list), at a place (the step function, before or
after its loss; the forward of the model, or of a module that has most of it, or of a small one),
in a model of a kind (what comes before the question may normalise, write in place, keep state).
"""

from __future__ import annotations

import itertools
from functools import partial

from small_scripts import outcome_of

#: Each makes something of an activation ``t``, which keeps its shape.
QUESTIONS = {
    "branch": "if t.mean() > 0: t = t * 2",
    "branch on item": "t = t * 2 if t.mean().item() > 0.01 else -t",
    "branch on float": "t = t * 2 if float(t.sum()) < 0.1 else t + 1",
    "number": "t = t * float(t.detach().abs().mean())",
    "number of item": "t = t / max(t.detach().norm().item(), 0.1)",
    "root of item": "import math; t = t * math.sqrt(t.detach().square().sum().item() + 1)",
    "int": "t = t + int(t.detach().abs().sum() * 10) % 3",
    "loop": "for _ in range(int(t.detach().abs().sum() * 7) % 4): t = t * 0.9",
    "while": "while t.norm() > 0.5: t = t * 0.7",
    "assertion": "assert torch.isfinite(t).all()",
    "guard": "if not torch.isfinite(t).all(): raise FloatingPointError('not finite')",
    "any": "t = -t if (t > 0.4).any() else t + 0.5",
    "early exit": "if t.max() < 0.3: return t.sum() * torch.ones_like(t)",
    "selection": "t = t + t[t[:, 0] > 0].sum()",
    "masked": "t = t + t.masked_select(t > 0.1).sum()",
    "nonzero": "t = t * (1 + len((t > 0).nonzero()))",
    "where": "rows, _ = torch.where(t > 0); t = t + t[rows].sum()",
    "unique": "t = t * len(t.detach().mul(3).round().unique())",
    "list": "t = t[:, t.detach().mean(0).argsort().tolist()]",
    "largest of list": "t = t * max(t.detach().flatten().tolist())",
    "index": "t = t + t[:, int(t.detach().mean(0).argmax())].mean()",
    "slice": "t = t + t[:, : 1 + int(t.detach()[0, 0] > 0)].mean()",
    "equal": "t = t * 2 if torch.equal(t > 0, t > 0.2) else t * 3",
    "close": "t = t * 2 if torch.allclose(t, t.mean(), atol=0.3) else t * 3",
    "text": "t = t + len(f'{t.detach().mean().item():.3f}')",
    "key": "t = t * {True: 2.0, False: 0.5}[bool(t[0, 0] > t[-1, -1])]",
    "normal": "t = t - torch.distributions.Normal(t, 1.0).log_prob(t.detach() + 0.5)",
    "categorical": (
        "t = t + torch.distributions.Categorical(logits=t).log_prob(t.detach().argmax(1)).sum()"
    ),
    "repeated": "t = t + t.repeat_interleave(1 + (t.detach()[:, 0] > 0).long(), 0).mean()",
    "counts": "t = t * (1 + torch.bincount(t.detach().argmax(1)).max())",
    "split": "parts = t.split([1, len(t) - 1] if t[0, 0] > 0 else [len(t)]); t = torch.cat(parts)",
    "two": "if t.mean() > 0: t = t * 2\n{indent}if t.max() > 0.4: t = t - 1",
    "asked again": "m = t.mean().item()\n{indent}t = t * (2 if m > 0 else 3) * (m > -1)",
    "stored": "self_or_none = t.std().item() > 0.2\n{indent}t = t if self_or_none else t * 1.5",
}
#: The same, behind modules that keep state.
KEPT_BEFORE = {
    "kept": "if t.mean() > 0.02: t = t * 2",
    "kept number": "t = t * float(t.detach().abs().mean())",
    "called again": "if t.mean() > 0.02: t = self.blocks[0](t)",
    "asked at times": "if x[0, 0] > 0 and t.mean() > 0.02: t = t * 2",
    "only looked at": "assert t.isfinite().all()",
    "trains at times": (
        "self.blocks[2].train(bool(x[1, 1] < 0.5)); t = self.blocks[2](t)\n"
        "{indent}if t.mean() > 0.02: t = t * 2"
    ),
    "called at times": "t = self.blocks[1](t) if x[0, 0] > 0 else t * t.std().item()",
}
#: Each is what a module makes of ``t`` and of a number that is given to it.
GIVEN = {
    "branch": "t * 2 if n > 0.1 else -t",
    "float": "t * math.sqrt(float(n))",
    "length": "t + t[:, : 1 + int(n * 10) % 3].mean()",
    "product": "t * n",
    "text": "t + len(f'{n:.2f}')",
    "computed": "t.clamp(min=-n) * round(n * n, 2)",
}
_GIVES = {
    "number": "t = self.given(t, t.detach().abs().mean().item())",
    "sum": "t = self.given(t, n=t.detach().abs().mean().item() + 0.25)",
}
#: Modules are given tensors in objects of classes of torch.
_PACKS = {
    "packed": "pack_padded_sequence(t[:, None].expand(-1, 3, -1), lengths, True, False)",
    "sorted": "pack_padded_sequence(t[:, None].expand(-1, 3, -1), lengths.sort()[0].flip(0), True)",
}
_PACKED = (
    "from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence\n"
    "{{indent}}lengths = 1 + (t.detach()[:, 0] > 0).long().cpu()\n"
    "{{indent}}t = pad_packed_sequence(self.cell({packs})[0], True)[0][:, 0]"
)
_FORWARD = """
        t = self.first(x)
        t = self.blocks[0](t)
        {middle}
        for block in self.blocks[1:]:
            t = block(t)
        {end}
        return self.head(t)
"""
_OUTER = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.last = Trunk(), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.trunk(x).tanh())
"""
_SCRIPT = """
import math
import torch
from torch import nn

class Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, t, n):
        t = self.linear(t)
        return {given}

class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, t):
        t = self.linear(t)
        {inside}
        return t

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.between = nn.Linear(4, 4), {between}

    def forward(self, x):
        return x + self.between(self.linear(x))

class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), {head}
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.given, self.cell = Given(), nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):{forward}
{outer}
def body(model, x, y):
    {before}
    t = model(x)
    {after}
    loss = (t - y).square().mean()
    {last}
    model.backward(loss)
    return loss
"""
#: What the blocks have between their linear maps and what they add to.
BETWEEN = {
    "tanh": "nn.Tanh()",
    "in place": "nn.ReLU(inplace=True)",
    "norm": "nn.BatchNorm1d(4)",
    "spectral": "nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))",
    "recurrent": "Last()",
}
#: The same, for what keeps state that the next microbatch sees.
KEEPING = {
    "former spectral": "nn.utils.spectral_norm(nn.Linear(4, 4))",
    "codebook": "Codebook()",
    "replaced": "Replaced()",
    "counter": "Counter()",
    "list": "Noting()",
    "updated": "Updated()",
}
_KEEPERS = """
class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(3, 4))
        self.register_buffer("sizes", torch.ones(3))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x):
        nearest = nn.functional.one_hot(torch.cdist(x, self.codes).argmin(1), 3).to(x.dtype)
        found = nearest @ self.codes
        if self.training:
            self.sizes.mul_(0.6).add_(nearest.sum(0), alpha=0.4)
            self.sums.mul_(0.6).add_(nearest.T @ x.detach(), alpha=0.4)
            self.codes.copy_(self.sums / self.sizes[:, None])
        return x + (found - x).detach()

class Replaced(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = self.mean * 0.5 + x.detach().mean(0)
        return x - self.mean

class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (1 - 0.1 * (self.calls % 7))

class Noting(nn.Module):
    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, x):
        self.sizes.append(float(len(self.sizes)))
        return x * (1 + 0.1 * (self.sizes[-1] % 5))

class Updated(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.weight.register_post_accumulate_grad_hook(self.update)

    def update(self, weight):
        with torch.no_grad():
            weight -= 0.1 * weight.grad.sign()
"""
#: Where the question is, and how deep it is indented.
PLACES = {
    "middle": 8,
    "end": 8,
    "trunk": 8,
    "inside": 8,
    "after": 4,
    "last": 4,
}
#: Those where the modules of the model are at hand.
_IN_FORWARD = ("middle", "end", "trunk")
_LAST = """
class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        return self.cell(x[:, None])[0][:, -1]
"""


def script_of(question: str, place: str, between: str, given: str = "t") -> str:
    """Returns a script.

    Args:
        question: what is made of an activation.
        place: where.
        between: what blocks have between their maps and their sums.
        given: what a module makes of a number.
    """
    asked = question.replace("{indent}", " " * PLACES[place])
    in_body = place in ("after", "last")
    if in_body:
        asked = asked.replace("return t.sum() * torch.ones_like(t)", "t = t.sum() + t")
    if place == "last":
        asked = f"was, t = t, loss.reshape(1, 1).expand(2, 4)\n    {asked}\n    loss = t.mean()"
    holes = dict.fromkeys(("before", "middle", "end", "inside", "after", "last"), "pass")
    holes["middle" if place == "trunk" else place] = asked
    forward = _FORWARD.format(**{each: holes[each] for each in ("middle", "end")})
    script = _SCRIPT.format(
        name="Trunk" if place == "trunk" else "Net",
        outer=_OUTER if place == "trunk" else "",
        head="Asks()" if place == "inside" else "nn.Linear(4, 4)",
        between=(BETWEEN | KEEPING)[between],
        given=given,
        forward=forward,
        **{each: holes[each] for each in ("inside", "before", "after", "last")},
    )
    keepers = _KEEPERS if between in KEEPING else ""
    return script.replace("class Asks", f"{_LAST}{keepers}\nclass Asks", 1)


def _outcome(*script: str) -> str:
    return outcome_of(script_of(*script), lambda *_: None)


#: Name -> runs it in this job, and returns what became of it.
ASKED = (
    {
        f"{name}, {place}, {between}": partial(_outcome, question, place, between)
        for (name, question), place, between in itertools.product(
            QUESTIONS.items(), PLACES, BETWEEN
        )
    }
    | {
        f"given {kind} {name}, {place}, {between}": partial(_outcome, gives, place, between, given)
        for (name, given), (kind, gives) in itertools.product(GIVEN.items(), _GIVES.items())
        for place, between in itertools.product(_IN_FORWARD, BETWEEN)
    }
    | {
        f"{name}, {place}, {between}": partial(
            _outcome, _PACKED.format(packs=packs), place, between
        )
        for (name, packs), place, between in itertools.product(_PACKS.items(), _IN_FORWARD, BETWEEN)
    }
    | {
        f"{name}, {place}, {between}": partial(_outcome, question, place, between)
        for (name, question), place, between in itertools.product(
            KEPT_BEFORE.items(), ("middle", "end"), ("spectral", "norm", *KEEPING)
        )
    }
)
