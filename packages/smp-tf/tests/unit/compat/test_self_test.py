"""The installed TensorFlow has what the package takes of it beyond its public API."""

from __future__ import annotations

from smdistributed.modelparallel.tensorflow.compat.self_test import self_test


def test_what_is_used_of_tensorflow_works() -> None:
    self_test()
