"""The garbage collector rests while modules are imported, and is then as it was."""

from __future__ import annotations

import gc

import pytest

from smdistributed.modelparallel.common.importing import without_collector


def test_it_rests_inside_alone() -> None:
    with without_collector():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_comes_back_where_an_import_fails() -> None:
    with pytest.raises(ImportError), without_collector():
        raise ImportError
    assert gc.isenabled()


def test_one_that_rested_before_stays_so() -> None:
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
