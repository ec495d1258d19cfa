"""The TensorFlow package says what it lacks, and pretends nothing."""

from __future__ import annotations

from importlib.metadata import version

import pytest

import smdistributed.modelparallel.tensorflow as smp
from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError


@pytest.mark.parametrize("config", [None, {"partitions": 2}, "config.yaml"])
def test_init_says_that_the_engine_is_missing_and_what_to_use(config: object) -> None:
    with pytest.raises(UnsupportedError) as raised:
        smp.init(config)  # type: ignore[arg-type]
    message = str(raised.value)
    assert f"smp-tf {version('smp-tf')}" in message
    assert "smdistributed.modelparallel.torch" in message


def test_init_can_be_caught_as_any_error_of_the_library() -> None:
    with pytest.raises(SMPError):
        smp.init()


@pytest.mark.parametrize("name", ["rank", "size", "DistributedModel", "step", "DP_GROUP"])
def test_no_name_is_given_that_does_not_work(name: str) -> None:
    assert not hasattr(smp, name)
    assert smp.__all__ == ["init"]
