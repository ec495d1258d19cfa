"""A plugin for pytest: the fixture ``worlds``, and a count of the processes that tests started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from smdistributed.modelparallel.common.testing import jobs
from smdistributed.modelparallel.common.testing.worlds import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """The pool of worlds of this session."""
    pool = Worlds()
    try:
        yield pool
    finally:
        pool.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how many processes were started, and by what."""
    if jobs.started:
        counts = ", ".join(f"{launcher} {count}" for launcher, count in jobs.started.items())
        terminalreporter.write_line(f"processes started: {counts}")
