"""A population of layers that reach what another layer keeps, past the tree of modules.

``self.other[0].kept`` in a list, a closure or a global: autograd sees such reads, the tree of
modules does not. The rank that runs the one must see what the other has done, in each microbatch.
"""

from __future__ import annotations

import itertools

from uses import Use

#: What is kept: how it is made, and what it is called by its layer and by others.
KEPT = {
    "buffer": "self.register_buffer('kept', torch.ones(4))",
    "attribute": "self.kept = torch.ones(4)",
    "number": "self.kept = 1.0",
    "parameter": "self.kept = nn.Parameter(torch.ones(4), requires_grad=False)",
    "trained": "self.kept = nn.Parameter(torch.ones(4))",
}
#: What a layer does with it, before it computes.
DOES = {
    "nothing": "pass",
    "reads": "x = x * {0}.kept",
    "writes": "{0}.kept.mul_(0.5).add_(x.detach().mean(0))",
    "writes data": "{0}.kept.data.mul_(0.5).add_(x.detach().mean(0))",
    "sets": "{0}.kept = {0}.kept * 0.5 + 1",
    "adds to a number": "{0}.kept += 0.5",
}
#: How the other layer finds it.
WAYS = {
    "list": ("self.other = [KEEPER[0]]", "self.other[0]"),
    "global": ("pass", "KEEPER[0]"),
    "method": ("self.other = KEEPER[0].forward", "self.other.__self__"),
}
#: Where the layers are called; the first may return what it keeps.
PLACES = {
    "then": Use(glue="x, _ = self.keeper(x)\nx = self.reaching(x)"),
    "before": Use(glue="x = self.reaching(x)\nx, _ = self.keeper(x)"),
    "far": Use(glue="x, _ = self.keeper(x)", late="x = self.reaching(x)"),
    "far before": Use(glue="x = self.reaching(x)", late="x, _ = self.keeper(x)"),
    "around": Use(glue="x = self.reaching(x)\nx, _ = self.keeper(x)", late="x = self.reaching(x)"),
    "apart": Use(
        glue="x, _ = self.keeper(x)",
        late="x = self.reaching(x)",
        # Where the user says where modules are; the keeper is on partition 0.
        built="[smp.set_partition(each, 1) for each in (net.reaching, net.third, net.fourth)]",
    ),
    "shown": Use(glue="x, shown = self.keeper(x)\nx = self.reaching(x)", late="x = x + shown"),
}


def _use(kept: str, own: str, other: str, way: str, place: str) -> Use:
    found, name = WAYS[way]
    return Use(
        top=f"""
            import smdistributed.modelparallel.torch as smp
            KEEPER = []
            class Keeper(nn.Linear):
                def __init__(self):
                    super().__init__(4, 4)
                    {KEPT[kept]}
                    KEEPER[:] = [self]
                def forward(self, x):
                    x = super().forward(x)
                    {DOES[own].format("self")}
                    return x, {"self.kept" if place == "shown" else None}
            class Reaching(nn.Linear):
                def __init__(self):
                    super().__init__(4, 4)
                    {found}
                def forward(self, x):
                    x = super().forward(x)
                    {DOES[other].format(name)}
                    return x
        """,
        init="self.keeper = Keeper(); self.reaching = Reaching()",
        glue=PLACES[place].glue,
        late=PLACES[place].late,
        built=PLACES[place].built,
    )


REACHED = {
    f"{kept}, {own}, {other}, {way}, {place}": _use(kept, own, other, way, place)
    for kept, own, other, way, place in itertools.product(KEPT, DOES, DOES, WAYS, PLACES)
    if other != "nothing"
    and not (kept == "number" and {own, other} & {"writes", "writes data"})
    and not (kept == "trained" and {own, other} & {"writes", "adds to a number", "sets"})
    and not (kept == "parameter" and {own, other} & {"sets"})
}
