"""The state of an optimizer by the names of parameters, so that it fits any partition.

Torch numbers the parameters: ``{"state": {0: {...}}, "param_groups": [{..., "params": [0, 1]}]}``.
The named form has their names in place of the numbers, and that of one rank has only the names of
the parameters that this rank holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from smdistributed.modelparallel.common.errors import CheckpointError

State = Mapping[str, Any]
#: The names of the parameters of each parameter group.
Groups = Sequence[Sequence[str]]
#: What the fp32 value of a parameter is called in its state.
MASTER = "master"
#: What the state of the loss scale is called.
LOSS_SCALE = "loss_scale"


def is_named(state: State) -> bool:
    """Tells whether a state is in the named form, as also one without parameters is."""
    groups = state["param_groups"]
    return all(isinstance(key, str) for group in groups for key in group["params"])


def to_names(state: State, groups: Groups, kept: Collection[str]) -> dict[str, Any]:
    """Names the parameters of a numbered state.

    Args:
        state: torch's form.
        groups: the names of all parameters, in the order of their numbers.
        kept: the parameters to keep.

    Raises:
        ValueError: the state is for other numbers of parameters.
    """
    numbers = [group["params"] for group in state["param_groups"]]
    found, expected = [len(group) for group in numbers], [len(names) for names in groups]
    if found != expected:
        raise ValueError(
            f"the state is for parameter groups of {found} parameters, the optimizer has "
            f"{expected}: build it over the same parameters in the same order."
        )
    name_of = {
        number: name
        for group, names in zip(numbers, groups, strict=True)
        for number, name in zip(group, names, strict=True)
    }
    return {
        "state": {
            name_of[number]: values
            for number, values in state["state"].items()
            if name_of.get(number) in kept
        },
        "param_groups": [
            {**settings(group), "params": [name for name in names if name in kept]}
            for group, names in zip(state["param_groups"], groups, strict=True)
        ],
    }


def to_numbers(state: State, groups: Groups) -> dict[str, Any]:
    """Numbers the parameters of a named state; those that ``groups`` lacks are left out."""
    numbers = {name: number for number, name in enumerate(_flat(groups))}
    return {
        "state": {
            numbers[name]: values for name, values in state["state"].items() if name in numbers
        },
        "param_groups": [
            {**settings(group), "params": [numbers[name] for name in names]}
            for group, names in zip(state["param_groups"], groups, strict=True)
        ],
    }


def without_half(state: State) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Takes a named state apart.

    Returns:
        What an optimizer itself keeps, and what half precision adds, in the same form; None if
        that is nothing.
    """
    masters = {
        name: {MASTER: values[MASTER]}
        for name, values in state["state"].items()
        if MASTER in values
    }
    rest = {
        name: {key: value for key, value in values.items() if key != MASTER}
        for name, values in state["state"].items()
    }
    kept = {key: value for key, value in state.items() if key != LOSS_SCALE}
    bare = {**kept, "state": {name: values for name, values in rest.items() if values}}
    if not masters and LOSS_SCALE not in state:
        return bare, None
    return bare, {**state, "state": masters}


def joined(state: State) -> dict[str, Any]:
    """Returns a state whose parameters are in one dict, of one that has a dict for each replica."""
    if not isinstance(state["state"], list):
        return dict(state)
    return {
        **state,
        "state": {name: each for part in state["state"] for name, each in part.items()},
    }


def only_masters(state: State) -> dict[str, Any]:
    """Returns a state, by name or number, without what an optimizer itself keeps."""
    masters = {
        key: {MASTER: values[MASTER]} for key, values in state["state"].items() if MASTER in values
    }
    return {**state, "state": masters}


def merge(parts: Sequence[State]) -> dict[str, Any]:
    """Returns the union of named states of several ranks.

    Raises:
        CheckpointError: the ranks have different numbers of parameter groups.
    """
    counts = [len(part["param_groups"]) for part in parts]
    if len(set(counts)) > 1:
        raise CheckpointError(
            f"every rank must have the same parameter groups; the parts have {counts}."
        )
    state: dict[str, Any] = {}
    for part in parts:
        for name, values in part["state"].items():
            state[name] = {**state[name], **values} if name in state else values
    scales = [part[LOSS_SCALE] for part in parts if LOSS_SCALE in part]
    return {
        **({LOSS_SCALE: scales[0]} if scales else {}),
        "state": state,
        "param_groups": [
            {
                **_common_settings(number, groups),
                "params": list(dict.fromkeys(name for group in groups for name in group["params"])),
            }
            for number, groups in enumerate(
                zip(*(part["param_groups"] for part in parts), strict=True)
            )
        ],
    }


def _common_settings(number: int, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what all ranks with parameters in a group say of it besides these.

    Others may know less: optimizers that count their steps in groups leave empty ones out.

    Raises:
        CheckpointError: they say different numbers.
    """
    first, *others = [group for group in groups if group["params"]] or groups[:1]
    for other in others:
        for key, value in settings(first).items():
            if isinstance(value, int | float) and key in other and other[key] != value:
                raise CheckpointError(
                    f"parameter group {number} has {key} {value!r} on one rank and {other[key]!r} "
                    "on another, so that the ranks train in different ways: set it alike on every "
                    "rank; an optimizer that computes it from the parameters cannot be used where "
                    "ranks update different ones."
                )
    return settings(first)


def names_in(state: State) -> list[list[str]]:
    """Returns the names of the parameters in each group of a named state."""
    return [list(group["params"]) for group in state["param_groups"]]


def check_covers(state: State, groups: Groups, needed: Collection[str]) -> None:
    """Raises unless each needed parameter is in the same group of the named state.

    Raises:
        CheckpointError: names the first that is not.
    """
    for number, (names, found) in enumerate(zip(groups, names_in(state), strict=True)):
        for name in names:
            if name in needed and name not in found:
                raise CheckpointError(
                    f"the optimizer state lacks parameter {name} in parameter group {number}: "
                    "it was saved from another model or with other parameter groups."
                )


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a parameter group says besides its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _flat(groups: Groups) -> list[str]:
    return [name for names in groups for name in names]
