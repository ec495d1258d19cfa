"""Which documents an expression of the service's search is true of.

Source: the public schema of ``SearchExpression``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from smdistributed.modelparallel.common.errors import ConfigError, UnsupportedError

_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "GreaterThan": operator.gt,
    "GreaterThanOrEqualTo": operator.ge,
    "LessThan": operator.lt,
    "LessThanOrEqualTo": operator.le,
}
_WORDS: dict[str, Callable[[str, str], bool]] = {
    "Equals": operator.eq,
    "Contains": lambda found, asked: asked in found,
    "In": lambda found, asked: found in asked.split(","),
}
_OPERATORS = (*_WORDS, *_ORDERS, "NotEquals", "Exists", "NotExists")


def matches(expression: Mapping[str, Any], document: Mapping[str, Any]) -> bool:
    """Returns whether an expression is true of a document.

    Raises:
        ConfigError: it has an operator that is none.
        UnsupportedError: it asks for statistics of numbers.
    """
    found = [_holds(each, document) for each in expression.get("Filters", ())]
    for nested in expression.get("NestedFilters", ()):
        inner = {"Filters": nested["Filters"]}
        parts = _values(nested["NestedPropertyName"], document)
        found.append(any(matches(inner, part) for part in parts))
    found += [matches(each, document) for each in expression.get("SubExpressions", ())]
    is_any = expression.get("Operator") == "Or" and found
    return any(found) if is_any else all(found)


def _holds(asked: Mapping[str, Any], document: Mapping[str, Any]) -> bool:
    path, what, value = asked["Name"], asked.get("Operator", "Equals"), asked.get("Value", "")
    if what not in _OPERATORS:
        raise ConfigError(
            f"a filter's Operator must be one of {', '.join(_OPERATORS)}; got {what!r}."
        )
    if path.partition(".")[0] == "Metrics":
        raise UnsupportedError(
            f"a search for {path!r} is not offered: list the components, and compare their Metrics."
        )
    found = list(_values(path, document))
    if what in ("Exists", "NotExists"):
        return (what == "Exists") is bool(found)
    if what == "NotEquals":
        return str(value) not in map(str, found)
    if compare := _ORDERS.get(what):
        return any(_ordered(compare, each, value) for each in found)
    return any(_WORDS[what](str(each), str(value)) for each in found)


def _ordered(compare: Callable[[Any, Any], bool], found: Any, asked: str) -> bool:
    if isinstance(found, str):
        return compare(found, asked)
    try:
        return compare(found, float(asked))
    except ValueError:
        return False


def _values(path: str, document: Any) -> Iterator[Any]:
    """Yields what is at a path of members; of lists, what is there in each element."""
    if isinstance(document, list | tuple):
        for element in document:
            yield from _values(path, element)
    elif not path:
        yield from _plain(document)
    elif isinstance(document, Mapping):
        name, _, rest = path.partition(".")
        if name == "Tags" and rest:
            pairs = document.get("Tags", ())
            yield from (pair["Value"] for pair in pairs if pair["Key"] == rest)
        elif name in document:
            yield from _values(rest, document[name])


def _plain(found: Any) -> Iterator[Any]:
    """Yields a value, which a parameter has in one of two members."""
    if isinstance(found, Mapping) and found.keys() <= {"StringValue", "NumberValue"}:
        yield from found.values()
    else:
        yield found
