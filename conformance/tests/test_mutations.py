"""Faults fit the sources that they break."""

from __future__ import annotations

import pytest

from conformance import mutations


@pytest.mark.parametrize("framework", mutations.PACKAGES)
def test_each_place_is_there_once(framework: str) -> None:
    places = [
        mutations.ROOT / "packages" / package / "src" / "smdistributed" / "modelparallel"
        for package in mutations.PACKAGES[framework]
    ]
    gone = {
        each.name: found
        for each in mutations.MUTATIONS[framework]
        if (
            found := [
                file.read_text(encoding="utf-8").count(each.old)
                for place in places
                if (file := place / each.file).exists()
            ]
        )
        != [1]
    }
    assert not gone
