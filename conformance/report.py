"""Rows and cases against each other, as text, JSON and a page."""

from __future__ import annotations

import collections
import html
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.outcome import Outcome, Status, worst
from conformance.registry import Case
from conformance.rows import Row


@dataclass(frozen=True)
class Report:
    """What a run found.

    Attributes:
        framework: whose package was tried.
        rows: of the specification, by id.
        cases: that were run, by name.
        outcomes: of the cases, by name.
    """

    framework: str
    rows: Mapping[str, Row]
    cases: Mapping[str, Case]
    outcomes: Mapping[str, Outcome]

    def cases_of(self, row: str) -> list[str]:
        """Returns the names of a row's cases."""
        return [name for name, each in self.cases.items() if row in each.rows]

    def status_of(self, row: str) -> Status:
        """Returns how a row stands: as the worst of its cases."""
        status = worst([self.outcomes[name] for name in self.cases_of(row)]).status
        if status is Status.PASSED and self.rows[row].without_effect:
            return Status.NO_EFFECT
        return status

    def totals(self) -> dict[str, int]:
        """Returns how many rows stand how."""
        found = collections.Counter(self.status_of(row) for row in self.rows)
        return {status.value: found[status] for status in Status}

    def _lines(self, is_whole: bool) -> Iterator[str]:
        for row in self.rows:
            if is_whole or self.cases_of(row):
                yield f"{self.status_of(row).value:24} {row}"
        for name, outcome in self.outcomes.items():
            if outcome.status is Status.FAILED:
                yield f"\n{name} ({', '.join(self.cases[name].rows)}):\n{outcome.reason}"
        yield from self._not_installed()
        if is_whole:
            totals = ", ".join(f"{count} {status}" for status, count in self.totals().items())
            yield f"\n{self.framework}: {len(self.rows)} rows: {totals}; {len(self.cases)} cases"
        else:
            counts = collections.Counter(each.status.value for each in self.outcomes.values())
            yield "cases: " + ", ".join(f"{count} {status}" for status, count in counts.items())

    def _not_installed(self) -> Iterator[str]:
        reasons = collections.Counter(
            each.reason for each in self.outcomes.values() if each.status is Status.NOT_INSTALLED
        )
        for reason, count in reasons.items():
            yield f"\n{Status.NOT_INSTALLED} ({count}): {reason}"

    def text(self, *, is_whole: bool = True) -> str:
        """Returns the report for a terminal.

        Args:
            is_whole: whether all cases were run, so that rows without any count.
        """
        return "\n".join(self._lines(is_whole))

    def data(self) -> dict[str, object]:
        """Returns the report as plain data."""
        return {
            "framework": self.framework,
            "totals": self.totals(),
            "rows": [
                {
                    "id": row.id,
                    "source": row.source,
                    "status": self.status_of(row.id).value,
                    "without_effect": row.without_effect,
                    "cases": {
                        name: {
                            "title": self.cases[name].title,
                            "status": self.outcomes[name].status.value,
                            "reason": self.outcomes[name].reason,
                        }
                        for name in self.cases_of(row.id)
                    },
                }
                for row in self.rows.values()
            ],
        }

    def page(self) -> str:
        """Returns the report as an HTML page."""
        totals = ", ".join(f"{count} {status}" for status, count in self.totals().items())
        return _PAGE.format(
            framework=self.framework,
            totals=html.escape(totals),
            rows="\n".join(self._row(row) for row in self.rows.values()),
        )

    def _row(self, row: Row) -> str:
        cases = "<br>".join(self._case(name) for name in self.cases_of(row.id))
        status = self.status_of(row.id)
        kind = status.name.lower().replace("_", "-")
        why = f": {row.without_effect}" if status is Status.NO_EFFECT else ""
        return (
            f'<tr class="{kind}"><td>{html.escape(row.id)}</td>'
            f"<td>{html.escape(status.value + why)}</td>"
            f"<td>{cases}</td><td>{html.escape(row.source)}</td></tr>"
        )

    def _case(self, name: str) -> str:
        reason = html.escape(self.outcomes[name].reason, quote=True)
        return f'<span title="{reason}">{html.escape(self.cases[name].title)}</span>'

    def write(self, folder: Path) -> None:
        """Writes all forms into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.txt").write_text(self.text() + "\n", encoding="utf-8")
        (folder / "report.json").write_text(json.dumps(self.data(), indent=1), encoding="utf-8")
        (folder / "report.html").write_text(self.page(), encoding="utf-8")


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Conformance: {framework}</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 2rem; }}
table {{ border-collapse: collapse; }}
td, th {{ padding: 0.3rem 0.6rem; border-bottom: 1px solid #ccc; }}
td, th {{ text-align: left; vertical-align: top; }}
.passed td:nth-child(2) {{ color: #16772f; }}
.failed td:nth-child(2) {{ color: #b3151d; font-weight: bold; }}
.not-built td:nth-child(2), .no-case td:nth-child(2) {{ color: #7a5d00; }}
.not-installed td:nth-child(2) {{ color: #7a5d00; }}
.no-effect td:nth-child(2) {{ color: #555; }}
</style>
</head>
<body>
<h1>Conformance: {framework}</h1>
<p>{totals}</p>
<table>
<thead><tr><th>row</th><th>status</th><th>cases</th><th>source</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</body>
</html>
"""
