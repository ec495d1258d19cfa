"""What the tests of all packages share."""

import gc
import signal
from collections.abc import Iterator

import pytest

pytest_plugins = ["smdistributed.modelparallel.common.testing.plugin"]

# A shell that starts pytest in the background has it ignore Ctrl-C, and all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keeps the collector from what stays: modules, and thousands of tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
