"""Generators go on where they were captured, and the capture needs no trust to load."""

from __future__ import annotations

import io
import random

import numpy as np
import torch

from smdistributed.modelparallel.torch.checkpoint import generators as random_state

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float, float]:
    return torch.rand(()).item(), random.random(), random.gauss(), np.random.standard_normal()


def test_every_generator_goes_on_after_a_trip_through_a_file() -> None:
    draw()  # gauss and standard_normal keep a second number back
    stream = io.BytesIO()
    torch.save(random_state.capture(CPU), stream)
    expected = [draw() for _ in range(3)]
    stream.seek(0)
    random_state.restore(torch.load(stream, weights_only=True), CPU)
    assert [draw() for _ in range(3)] == expected


def test_a_state_without_numpy_leaves_numpy_alone() -> None:
    state = random_state.capture(CPU)
    del state["numpy"]
    np.random.seed(0)
    expected = np.random.random()
    np.random.seed(0)
    random_state.restore(state, CPU)
    assert np.random.random() == expected
