"""A population of checkpointed calls that write state, once forward and once again.

Every kind of state, checkpointed in every way, in every place of a pipeline; see ``uses``. State
ends as in one process, whose microbatches are computed again one after the other.
"""

# Code of scripts stands on one line.
# ruff: noqa: E501

from __future__ import annotations

import itertools

from uses import Use

#: A layer that keeps state: how it is made, and its class if it has one of its own.
STATES = {
    "batch norm": ("nn.BatchNorm1d(4)", ""),
    "cumulative batch norm": ("nn.BatchNorm1d(4, momentum=None)", ""),
    "batch norm that does not train": ("nn.BatchNorm1d(4).eval()", ""),
    "batch norm behind a map": ("nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))", ""),
    "batch norm before a map": ("nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))", ""),
    "spectral norm": ("parametrizations.spectral_norm(nn.Linear(4, 4))", ""),
    "functional": (
        "Keeping(4, 4)",
        "return F.batch_norm(super().forward(x), self.kept[0], self.kept[1], training=True)",
    ),
    "counter": (
        "Keeping(4, 4)",
        "self.count += 1; return super().forward(x) * (1 + self.count % 3)",
    ),
    "counter of a call": (
        "Keeping(4, 4)",
        "x = super().forward(x) * (1 + self.count % 3); self.count += 1; return x",
    ),
    "unread counter": ("Keeping(4, 4)", "self.calls += 1; return super().forward(x)"),
    "average": (
        "Keeping(4, 4)",
        "x = super().forward(x); self.kept[0].mul_(0.9).add_(x.detach().mean(0)); return torch.tanh(x) - self.kept[0]",
    ),
    "average behind all": (
        "Keeping(4, 4)",
        "x = super().forward(x); self.kept[0].mul_(0.9).add_(x.detach().mean(0)); return x",
    ),
    "new average": (
        "Keeping(4, 4)",
        "x = super().forward(x); self.kept = self.kept * 0.9 + x.detach().mean(); return torch.tanh(x) * self.kept.mean()",
    ),
    "cache": (
        "Keeping(4, 4)",
        "x = super().forward(x); x, self.last = torch.tanh(x) + self.last, x.detach().mean(0); return x",
    ),
    "log": (
        "Keeping(4, 4)",
        "self.log.append(1); return super().forward(x) * (1 + len(self.log) % 3)",
    ),
    "parameter": (
        "Keeping(4, 4)",
        "self.frozen.data.add_(x.detach().mean()); return super().forward(x) * self.frozen",
    ),
}
#: How a function is called, and what a layer is wrapped in.
WAYS = {
    "not": ("function(x)", "{0}"),
    "reentrant": ("checkpoint(function, x, use_reentrant=True)", "{0}"),
    "not reentrant": ("checkpoint(function, x, use_reentrant=False)", "{0}"),
    "to the end": ("to_the_end(function, x)", "{0}"),
    "marked": ("function(x)", "marked({0})"),
    "in a layer": ("function(x)", "Again({0}, False)"),
    "in a layer, reentrant": ("function(x)", "Again({0}, True)"),
    "twice": (
        "checkpoint(lambda x: checkpoint(function, x, use_reentrant=False), x, use_reentrant=False)",
        "{0}",
    ),
}
#: Where: on either partition, or on both; by code between them too.
PLACES = {
    "early": Use(glue="x = again(self.a, x)"),
    "late": Use(late="x = again(self.b, x)"),
    "both": Use(glue="x = again(self.a, x)", late="x = again(self.b, x)"),
    "across": Use(glue="x = again(lambda x: self.b(torch.tanh(self.a(x))), x)"),
    "across, at the end nothing": Use(glue="x = again(lambda x: self.idle(self.a(x)) + 1, x)"),
    "across, and back": Use(glue="x = again(lambda x: self.a(self.b(torch.tanh(self.a(x)))), x)"),
    "with code": Use(glue="x = again(lambda x: torch.tanh(self.a(x * 2)) * self.offset + x, x)"),
    "again": Use(glue="x = again(lambda x: self.a(torch.tanh(self.a(x))), x)"),
    "again, with a buffer": Use(
        glue="x = again(lambda x: self.a(torch.tanh(self.a(x)) * self.offset), x)"
    ),
    "again, and an argument": Use(
        glue="x = again(lambda x: self.a(torch.tanh(self.a(x)) + given), x)"
    ),
    "in two calls": Use(glue="x = again(self.a, torch.tanh(again(self.a, x)))"),
    "and without": Use(glue="x = self.a(torch.tanh(again(self.a, x)))"),
    "early and late": Use(glue="x = again(self.a, x)", late="x = again(self.a, x)"),
    "without gradients": Use(glue="x = x + torch.no_grad()(again)(self.a, x)"),
    "writes outside": Use(
        glue="base = x * 1; x = again(lambda x: self.a(x) + base.add_(1).mean().detach(), x)"
    ),
}


def _use(made: str, forward: str, call: str, wrapped: str, place: Use) -> Use:
    top = f"""
        import smdistributed.modelparallel.torch as smp
        from smdistributed.modelparallel.torch.activations.checkpointing import mark
        from torch.utils.checkpoint import set_checkpoint_early_stop
        class Keeping(nn.Linear):
            count = calls = last = 0
            def __init__(self, *sizes):
                super().__init__(*sizes)
                self.register_buffer("kept", torch.ones(2, 4))
                self.frozen, self.log = nn.Parameter(torch.ones(4), requires_grad=False), []
            def forward(self, x):
                {forward or "pass"}
        class Again(nn.Module):
            def __init__(self, inner, use_reentrant):
                super().__init__()
                self.inner, self.use_reentrant = inner, use_reentrant
            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        def marked(module):
            mark(module, True, False, "each", lambda module: None)
            return module
        def to_the_end(function, x):
            with set_checkpoint_early_stop(False):
                return checkpoint(function, x, use_reentrant=False)
        def again(function, x):
            return {call}
    """
    layer = wrapped.format(made)
    return Use(
        top=top,
        init=f"self.a, self.b = {layer}, {layer}; self.idle = nn.Identity(); self.register_buffer('offset', torch.full((4,), 0.5))",
        built="[smp.set_partition(part, index) for index, part in ((0, net.a), (1, net.b), (1, net.idle), (0, net.second), (1, net.third))]",
        more=", given",
        call="out = model(x, x * 0.1)",
        glue=place.glue,
        late=place.late,
    )


RECOMPUTED = {
    f"{state}, {way}, {place}": _use(*STATES[state], *WAYS[way], PLACES[place])
    for state, way, place in itertools.product(STATES, WAYS, PLACES)
}


#: A checkpointed call in which a layer goes by how it is switched: over both partitions, on one, and
#: in a layer.
_SWITCHED_CALLS = {
    "across": "x = checkpoint(lambda x: self.b(torch.tanh(self.a(x))), x, use_reentrant=False)",
    "near": "x = checkpoint(self.a, x, use_reentrant=False)",
    "inside": "x = self.inner(x)",
}
#: When it is switched.
_SWITCHES = {
    "never": Use(),
    "between": Use(
        loss="loss = ((out - y) ** 2).mean(); NET.eval()",
        backward="model.backward(loss); NET.train()",
    ),
    "after": Use(body="NET.train()", backward="model.backward(loss); NET.eval()"),
    "for good": Use(body="NET.train()", loss="loss = ((out - y) ** 2).mean(); NET.eval()"),
}
SWITCHED = {
    f"{call}, {switch}": Use(
        top="""
            import smdistributed.modelparallel.torch as smp
            class Switched(nn.Linear):
                def forward(self, x):
                    return torch.tanh(super().forward(x) * (2 if self.training else 3))
            class Again(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.inner = Switched(4, 4)
                def forward(self, x):
                    return checkpoint(self.inner, x, use_reentrant=False)
        """,
        init="self.a, self.b, self.inner = Switched(4, 4), Switched(4, 4), Again()",
        built="[smp.set_partition(part, index) for index, part in ((0, net.a), (1, net.b), (0, net.second), (1, net.third))]",
        glue=glue,
        body=_SWITCHES[switch].body,
        loss=_SWITCHES[switch].loss,
        backward=_SWITCHES[switch].backward,
    )
    for (call, glue), switch in itertools.product(_SWITCHED_CALLS.items(), _SWITCHES)
}
