"""A population of layers that leave tensors in an object which they are handed, and read others'.

A cache of keys is such an object. Ranks have copies of it, so a layer must find there what it would
in one process, wherever the layers lie, or the library must refuse it.
"""

from __future__ import annotations

import itertools

from uses import Use

#: What a layer leaves; ``y`` is what it returns, ``z`` a tensor on the way.
LEAVES = {
    "result": "y",
    "way": "z",
    "detached": "z.detach()",
    "view": "z[:, :2]",
    "weight": "self.weight",
    "argument": "x",
    "number": "torch.full((4, 4), self.number + 1.0)",
}
#: Where in the object: how it gets there, and how others find it.
PLACES = {
    "attribute": ("ctx.last = {}", "ctx.last"),
    "list": ("ctx.all.append({})", "(ctx.all[-1] if ctx.all else None)"),
    "dict": ("ctx.by[self.number] = {}", "ctx.by.get(self.number - 1)"),
    "place": ("ctx.all[:] = [{}]", "(ctx.all[0] if ctx.all else None)"),
}
#: What a layer makes of it.
READS = {
    "adds": "y = y if found is None else y + found.mean()",
    "returns": "back = found",
    "counts": "y = y if found is None else y * 2",
    "keeps": "ctx.kept = found; y = y if ctx.kept is None else y - ctx.kept.sum()",
}
#: The layers that leave something, and the one that reads.
WHO = {
    "the one before": ((2,), 3),
    "several": ((0, 1, 2), 3),
    "far": ((0,), 3),
    "two apart": ((0, 2), 3),
    "in the middle": ((0, 1), 2),
    "itself": ((0, 3), 3),
}
#: The partitions of the four layers.
PARTITIONS = ((0, 0, 1, 1), (0, 1, 1, 0), (0, 1, 0, 1))


def _use(leaves: str, place: str, reads: str, who: str, partitions: tuple[int, ...]) -> Use:
    writers, reader = WHO[who]
    put, find = PLACES[place]
    call = "x, back = self.all[{0}](x, ctx)\nx = x if back is None else x + back.mean()"
    return Use(
        top=f"""
            import smdistributed.modelparallel.torch as smp
            class Object:
                def __init__(self):
                    self.last, self.kept, self.all, self.by = None, None, [], {{}}
            class Handed(nn.Linear):
                def __init__(self, number):
                    super().__init__(4, 4)
                    self.number = number
                def forward(self, x, ctx):
                    z = super().forward(x)
                    y, back = torch.tanh(z), None
                    if self.number == {reader}:
                        found = {find}
                        {READS[reads]}
                    if self.number in {writers}:
                        {put.format(LEAVES[leaves])}
                    return y, back
        """,
        init="self.all = nn.ModuleList(map(Handed, range(4)))",
        glue="ctx = Object()\n" + "\n".join(call.format(number) for number in range(2)),
        late="\n".join(call.format(number) for number in range(2, 4)),
        built=f"[smp.set_partition(*each) for each in zip(net.all, {partitions})]\n"
        "[smp.set_partition(each, 1) for each in (net.third, net.fourth)]",
    )


HANDED = {
    f"{leaves}, {place}, {reads}, {who}, {''.join(map(str, partitions))}": _use(
        leaves, place, reads, who, partitions
    )
    for leaves, place, reads, who, partitions in itertools.product(
        LEAVES, PLACES, READS, WHO, PARTITIONS
    )
}
