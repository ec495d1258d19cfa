"""The documentation of the configuration, generated from its declarations."""

from __future__ import annotations

from smdistributed.modelparallel.common.config.parameters import Environment, Parameters
from smdistributed.modelparallel.common.config.schema import (
    BOTH,
    PYTORCH,
    TENSORFLOW,
    Settings,
    allowed,
    parameter,
)
from smdistributed.modelparallel.common.config.source import Envelope, Mpi

_FRAMEWORKS = {BOTH: "both", PYTORCH: "PyTorch", TENSORFLOW: "TensorFlow"}
_HEADER = ("Name", "Meaning", "Allowed", "Default", "Framework", "Since", "Source")


def table(settings: type[Settings]) -> str:
    """A Markdown table with one row for each setting of a group."""
    rows = [_HEADER, tuple("---" for _ in _HEADER)]
    for name, field in settings.model_fields.items():
        about = parameter(field)
        rows.append(
            (
                ", ".join(f"`{spelling}`" for spelling in (name, *about.aliases)),
                about.meaning,
                allowed(field),
                "required" if field.is_required() else about.default or _literal(field.default),
                _FRAMEWORKS[about.frameworks],
                about.since,
                about.source,
            )
        )
    return "\n".join(f"| {' | '.join(map(_escape, row))} |" for row in rows)


def page() -> str:
    """The reference page of the configuration, in Markdown."""
    sections = (
        ("Parameters", Parameters),
        ("Environment variables", Environment),
        ("Keys around the parameters (`smdistributed.modelparallel`)", Envelope),
        ("Keys of the launcher (`mpi`)", Mpi),
    )
    return "\n".join(f"## {title}\n\n{table(settings)}\n" for title, settings in sections)


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|")


def _literal(value: object) -> str:
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{shown}`"
