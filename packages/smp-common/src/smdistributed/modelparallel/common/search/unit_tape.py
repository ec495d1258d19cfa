"""A tape of a model of which only figures are known: each unit as if it were one operation."""

from __future__ import annotations

import dataclasses

from smdistributed.modelparallel.common.planning.pass_tape import (
    BackwardTape,
    Keeping,
    Memory,
    PassTape,
)
from smdistributed.modelparallel.common.search.profile import Figures, ModelProfile, UnitProfile


def with_tape(profile: ModelProfile) -> ModelProfile:
    """Returns a profile that has a tape.

    A unit makes all of its tensors at once, beside what it and those before keep, and so does its
    backward pass.
    """
    if profile.tape is not None:
        return profile
    units = sorted(profile.root.walk(), key=lambda unit: unit.order)
    places = {unit.name: place for place, unit in enumerate(units)}
    figures = [*(unit.own for unit in units), profile.beside]
    return dataclasses.replace(profile, tape=_tape(figures), root=_with_spans(profile.root, places))


def _tape(figures: list[Figures]) -> PassTape:
    memories: list[Memory] = []
    changes: dict[int, int] = {}
    last = len(figures) - 1
    for at, own in enumerate(figures):
        backward, made = last - at, round(own.made_bytes)
        memories.append(Memory(made, at))
        memories.append(Memory(round(own.kept_bytes), at, kept=(Keeping(at, backward + 1),)))
        changes[backward] = changes.get(backward, 0) + made
        changes[backward + 1] = changes.get(backward + 1, 0) - made
    positions = tuple(range(last, -1, -1))
    return PassTape(len(figures), tuple(memories), backward=BackwardTape(positions, changes))


def _with_spans(unit: UnitProfile, places: dict[str, int]) -> UnitProfile:
    place = places[unit.name]
    children = tuple(_with_spans(child, places) for child in unit.children)
    return dataclasses.replace(unit, spans=((place, place + 1),), children=children)
