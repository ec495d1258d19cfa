"""How a setting is declared and checked; knows no setting of its own.

A group of settings is a frozen pydantic model. Each field carries one `Parameter`, from which the
errors and the documentation are written, so that neither can drift from the declaration.
"""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

Framework = Literal["pytorch", "tensorflow"]
BOTH: tuple[Framework, ...] = ("pytorch", "tensorflow")
PYTORCH: tuple[Framework, ...] = ("pytorch",)
TENSORFLOW: tuple[Framework, ...] = ("tensorflow",)


class ConfigWarning(UserWarning):
    """A setting that has no effect, or is probably not what was meant."""


class Text(str):
    """A value that arrived as text (environment, command line): its parameter's type parses it."""

    __slots__ = ()


class Settings(BaseModel):
    """Base of every group of settings."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


@dataclass(frozen=True)
class Parameter:
    """What is said about one setting, beside its type, bounds and default.

    Attributes:
        meaning: one or two sentences for the documentation.
        since: version of the documented API that has it first.
        source: document that specifies it.
        frameworks: frameworks that know it.
        aliases: other spellings that are accepted.
        default: text for the documentation where the default is computed.
        allowed: text for errors and documentation where type and bounds do not say all.
    """

    meaning: str
    since: str
    source: str
    frameworks: tuple[Framework, ...] = BOTH
    aliases: tuple[str, ...] = ()
    default: str = ""
    allowed: str = ""


def _as_bool(value: object) -> object:
    if isinstance(value, Text):
        return {"true": True, "false": False}.get(value.lower(), value)
    return value


def _as_number(value: object) -> object:
    if not isinstance(value, Text):
        return value
    for number in (int, float):
        try:
            return number(value)
        except ValueError:
            continue
    return value


def _as_int(value: object) -> object:
    value = _as_number(value)
    integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if integral or (isinstance(value, float) and value.is_integer()):
        return int(value)  # type: ignore[call-overload]
    return value


Bool = Annotated[bool, BeforeValidator(_as_bool)]
Int = Annotated[int, BeforeValidator(_as_int)]
PositiveInt = Annotated[Int, Field(ge=1)]
Float = Annotated[float, BeforeValidator(_as_number)]


def parameter(field: FieldInfo) -> Parameter:
    """The `Parameter` that a field of a `Settings` class carries."""
    return next(item for item in field.metadata if isinstance(item, Parameter))


def allowed(field: FieldInfo) -> str:
    """What a field accepts, for people."""
    if text := parameter(field).allowed:
        return text
    if get_origin(field.annotation) is Literal:
        return f"one of {', '.join(get_args(field.annotation))}"
    kinds = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
    parts = [kinds.get(field.annotation, "a dictionary")]  # type: ignore[arg-type]
    for item in field.metadata:
        match item:
            case annotated_types.Ge(bound):
                parts.append(f"at least {bound}")
            case annotated_types.Gt(bound):
                parts.append(f"greater than {bound}")
            case annotated_types.Le(bound):
                parts.append(f"at most {bound}")
            case annotated_types.MultipleOf(unit):
                parts.append(f"a multiple of {unit}")
    return ", ".join(parts)


def names(settings: type[Settings]) -> dict[str, str]:
    """Every accepted spelling, with the main name it stands for."""
    return {
        spelling: name
        for name, field in settings.model_fields.items()
        for spelling in (name, *parameter(field).aliases)
    }


def describe(value: object) -> str:
    """A received value with its type."""
    kind = "str" if isinstance(value, str) else type(value).__name__
    try:
        return f"{value!r} ({kind})"
    except RecursionError:
        return f"a deeply nested value ({kind})"


def unknown_key(key: object, known: Iterable[str], path: str = "") -> str:
    """The problem of a key that does not exist, with up to three names like it."""
    near = difflib.get_close_matches(str(key), list(known), n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    shown = key if isinstance(key, str) and key.isprintable() and key else repr(key)
    return f"{path}{shown} is not a known parameter{hint}"


def check_values(
    settings: type[Settings],
    values: Mapping[str, object],
    *,
    path: str = "",
    spelled: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The problems of the values of one group of settings, without rules between them.

    Args:
        settings: the group.
        values: what was given.
        path: put before each name in the texts.
        spelled: main name -> what the user wrote.

    Returns:
        Problem by name; empty when ``settings.model_validate(values)`` succeeds.
    """
    try:
        settings.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False)
    else:
        return {}
    problems = {}
    for problem in found:
        name = str(problem["loc"][0])
        if problem["type"] == "default_factory_not_called":
            continue  # a consequence of another problem in the list
        if problem["type"] == "extra_forbidden":
            problems[name] = unknown_key(name, names(settings), path)
            continue
        shown = path + (spelled or {}).get(name, name)
        rule = f"{shown} must be {allowed(settings.model_fields[name])}"
        got = "it is missing" if problem["type"] == "missing" else f"got {describe(values[name])}"
        problems[name] = f"{rule}; {got}."
    return problems
