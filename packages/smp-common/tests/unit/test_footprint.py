"""A long run that holds more than a short one is noticed, whatever it holds."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from smdistributed.modelparallel.common.testing.footprint import check_long_run


def test_what_is_kept_a_step_is_noticed() -> None:
    kept: list[object] = []
    files: list[int] = []
    threads: list[threading.Thread] = []
    is_over = threading.Event()

    def keep_thread() -> None:
        threads.append(threading.Thread(target=is_over.wait, daemon=True))
        threads[-1].start()

    steps: dict[str, Callable[[], object]] = {
        "objects": lambda: kept.append([]),
        "files": lambda: files.append(os.open(os.devnull, os.O_RDONLY)),
        "threads": keep_thread,
        "resident_bytes": lambda: kept.append(os.urandom(2**20)),
    }
    try:
        for name, step in steps.items():
            with pytest.raises(AssertionError, match=f"after 5 and 20 steps: .*'{name}'"):
                check_long_run(step, 5, 20)
    finally:
        is_over.set()
        for file in files:
            os.close(file)


def test_what_is_kept_once_is_not() -> None:
    kept: dict[int, object] = {}
    check_long_run(lambda: kept.setdefault(0, [[], []]), 5, 20)
