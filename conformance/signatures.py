"""Signatures against those of the specification."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any


def differences(function: Callable[..., Any], printed: str) -> list[str]:
    """Returns in what a function differs from a printed signature; empty if in nothing.

    Every printed parameter must be there, at its place, with its default, and so must a rest that
    is printed with stars. More may follow, if they have defaults.
    """
    definition = ast.parse(f"def {printed}: pass".replace("def __call__", "def call")).body[0]
    assert isinstance(definition, ast.FunctionDef)
    own = [each for name, each in inspect.signature(function).parameters.items() if name != "self"]
    by_name = {each.name: each for each in own}
    taking_all = {each.kind for each in own} >= {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }
    wanted = definition.args
    names = [each.arg for each in wanted.args if each.arg != "self"]
    defaults = dict(zip(reversed(names), reversed(wanted.defaults), strict=False))
    defaults |= {
        each.arg: default
        for each, default in zip(wanted.kwonlyargs, wanted.kw_defaults, strict=True)
        if default is not None
    }
    found = []
    for position, name in enumerate([*names, *(each.arg for each in wanted.kwonlyargs)]):
        if name not in by_name:
            if not taking_all:
                found.append(f"{name} is missing")
            continue
        parameter = by_name[name]
        if position < len(names):
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                found.append(f"{name} can be given by its name alone")
            elif own.index(parameter) != position:
                found.append(f"{name} is parameter {own.index(parameter)}, not {position}")
        text = ast.unparse(defaults[name]) if name in defaults else None
        found += _default_differs(name, parameter, text)
    for printed_rest, kind, stars in (
        (wanted.vararg, inspect.Parameter.VAR_POSITIONAL, "*"),
        (wanted.kwarg, inspect.Parameter.VAR_KEYWORD, "**"),
    ):
        if printed_rest and kind not in {each.kind for each in own}:
            found.append(f"{stars}{printed_rest.arg} is missing")
    printed_names = {*names, *(each.arg for each in wanted.kwonlyargs)}
    for parameter in own:
        optional = parameter.default is not inspect.Parameter.empty or parameter.kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        )
        if parameter.name not in printed_names and not optional:
            found.append(f"{parameter.name} is required but not printed")
    return found


def _default_differs(name: str, parameter: inspect.Parameter, printed: str | None) -> list[str]:
    default = parameter.default
    if printed is None:
        if default is inspect.Parameter.empty:
            return []
        return [f"{name} has default {default!r}, but none is printed"]
    if default is inspect.Parameter.empty:
        return [f"{name} has no default, not {printed}"]
    shown = getattr(default, "__name__", None) if inspect.ismodule(default) else None
    try:
        same = default == ast.literal_eval(printed)
    except ValueError:  # a name, such as a module or a constant of the package
        same = printed.rpartition(".")[2] in (shown, getattr(default, "name", None))
    return [] if same else [f"{name} has default {default!r}, not {printed}"]
