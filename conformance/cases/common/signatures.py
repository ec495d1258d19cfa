"""Names and signatures, as printed in the documents: one case for each row that has one."""

from __future__ import annotations

from typing import Any

from conformance import rows, signatures
from conformance.adapters.base import Adapter
from conformance.registry import Body, Case, add
from conformance.worlds import FRAMEWORKS

#: Not callables of ours: a method that users write, and templates of whole families.
_NOT_OURS = {"smp_slice"}
#: Their features are not there yet; the cases of their rows ask for them.
_LATER = (
    "smp.nn.Distributed",
    "smp.nn.Flash",
    "smp.nn.Fused",
    "smp.nn.huggingface",
    "smp.optimizers",
    "smp.tp_register",
    "FP16_",
    "smp.DistributedOptimizer.clip_master_grads",
)


def find(smp: Any, row: str) -> Any:
    """Returns what a row names."""
    found: Any = smp
    for part in row.removeprefix("smp.").split("."):
        found = getattr(found, part)
    return found


def _agrees(row: rows.Row) -> Body:
    def body(adapter: Adapter) -> None:
        function = find(adapter.smp, row.id)
        assert row.signature is not None
        assert not signatures.differences(function, row.signature)

    return body


for _framework in FRAMEWORKS:
    for _row in rows.load(_framework).values():
        if _row.signature is None or _row.id in _NOT_OURS or _row.id.startswith(_LATER):
            continue
        add(
            Case(
                f"signature_of_{_row.id}_{_framework}",
                (_row.id,),
                ("new",),
                (_framework,),
                _agrees(_row),
            )
        )
