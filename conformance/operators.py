"""How a machine breaks lines: the operators of cosmic-ray, and three that it lacks."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names

from conformance.lines import Lines
from conformance.mutants import Mutant
from conformance.mutations import PACKAGES, ROOT

Span = tuple[tuple[int, int], tuple[int, int]]


class RemoveCall(Operator):  # type: ignore[misc]
    """Leaves out a call whose result nobody takes."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        """Yields the place of each such call."""
        if node.type == "expr_stmt" or node.type != "simple_stmt":
            return
        call = node.children[0]
        if call.type == "atom_expr" and str(call.children[-1].get_code()).startswith("("):
            yield call.start_pos, call.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Returns ``pass`` in its place."""
        first = node.children[0]
        node.children[0] = parso.parse("pass").children[0]
        node.children[0].prefix = first.get_first_leaf().prefix
        node.children[0].parent = node
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        """Returns none: they would be tests of cosmic-ray's own."""
        return ()


class SwapArguments(Operator):  # type: ignore[misc]
    """Exchanges the first two positional arguments of a call."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        """Yields the place of each argument list that has two."""
        if node.type != "arglist" or node.parent.type != "trailer":
            return
        first, second = node.children[0], node.children[2] if len(node.children) > 2 else None
        if second is not None and {first.type, second.type}.isdisjoint({"argument"}):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Returns the list with the two exchanged."""
        one, other = node.children[0], node.children[2]
        before, after = one.get_first_leaf().prefix, other.get_first_leaf().prefix
        node.children[0], node.children[2] = other, one
        other.get_first_leaf().prefix, one.get_first_leaf().prefix = before, after
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        """Returns none: they would be tests of cosmic-ray's own."""
        return ()


class ReturnNone(Operator):  # type: ignore[misc]
    """Returns None for a result."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        """Yields the place of each ``return`` with a value."""
        if node.type == "return_stmt":
            value = node.children[1].get_code(include_prefix=False)
            if value != "None":
                yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Returns the statement without its value."""
        node.children[1] = parso.parse("None").children[0]
        node.children[1].prefix = " "
        node.children[1].parent = node
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        """Returns none: they would be tests of cosmic-ray's own."""
        return ()


#: Of cosmic-ray's: one replacement for each operator, the one that changes most.
_CHOSEN = (
    *("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul", "Pow_Mul"),
    *("BitOr_BitAnd", "BitAnd_BitOr"),
    *("Eq_NotEq", "NotEq_Eq", "Lt_GtE", "LtE_Gt", "Gt_LtE", "GtE_Lt", "Lt_LtE", "Gt_GtE"),
    *("GtE_Gt", "LtE_Lt", "Is_IsNot", "IsNot_Is"),
    *("Delete_Not", "Delete_USub"),
)
_KINDS = {
    "ReplaceBinaryOperator": "arithmetic",
    "ReplaceComparisonOperator": "comparison",
    "ReplaceUnaryOperator": "negation",
    "AddNot": "condition",
    "ReplaceTrueWithFalse": "constant",
    "ReplaceFalseWithTrue": "constant",
    "NumberReplacer": "constant",
    "ReplaceAndWithOr": "condition",
    "ReplaceOrWithAnd": "condition",
    "ReplaceBreakWithContinue": "loop",
    "ReplaceContinueWithBreak": "loop",
    "ZeroIterationForLoop": "loop",
}


def operators() -> list[tuple[str, str, Operator]]:
    """Returns kind, name and operator of all that are used."""
    found: list[tuple[str, str, Operator]] = [
        ("removed call", "RemoveCall", RemoveCall()),
        ("swapped arguments", "SwapArguments", SwapArguments()),
        ("returned default", "ReturnNone", ReturnNone()),
    ]
    for name in operator_names():
        kind, _, change = name.removeprefix("core/").partition("_")
        if kind in _KINDS and (not change or change in _CHOSEN):
            found.append((_KINDS[kind], name.removeprefix("core/"), get_operator(name)()))
    return found


def files_of(framework: str) -> dict[str, Path]:
    """Returns the sources of a framework's packages, by their path below the namespace."""
    return {
        str(path.relative_to(place)): path
        for package in PACKAGES[framework]
        for place in [ROOT / "packages" / package / "src/smdistributed/modelparallel"]
        for path in sorted(place.rglob("*.py"))
    }


def candidates(framework: str, known: Lines) -> Iterator[Mutant]:
    """Yields every change of a line that a case runs, inside functions."""
    for file, path in files_of(framework).items():
        # What tests are made of is no part of what is documented.
        if file not in known or file.startswith("common/testing/"):
            continue
        text = path.read_text(encoding="utf-8")
        rows = text.splitlines()
        bodies = _bodies(text)
        tree = get_ast(text)
        for kind, name, operator in operators():
            occurrence = 0
            for node in ast_nodes(tree):
                for (line, _), _ in operator.mutation_positions(node):
                    if line in known[file] and line in bodies:
                        yield Mutant(file, line, kind, name, occurrence, rows[line - 1].strip())
                    occurrence += 1


def _bodies(text: str) -> set[int]:
    """Returns the lines inside functions, without their heads and documentation."""
    found: set[int] = set()
    pending = [parso.parse(text)]
    while pending:
        node = pending.pop()
        if node.type == "funcdef":
            suite = node.children[-1]
            found.update(range(suite.start_pos[0], suite.end_pos[0] + 1))
        pending += getattr(node, "children", ())
    return found


def chosen(every: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Returns a sample that has about as many of each kind."""
    numbers = random.Random(seed)
    kinds: dict[str, list[Mutant]] = {}
    for each in every:
        kinds.setdefault(each.kind, []).append(each)
    for group in kinds.values():
        numbers.shuffle(group)
    found: list[Mutant] = []
    while len(found) < count and any(kinds.values()):
        found += [group.pop() for group in kinds.values() if group]
    return found[:count]


def _is_python(text: str) -> bool:
    """Whether a text can be compiled: two stars are no power in front of keywords."""
    try:
        compile(text, "<mutant>", "exec")
    except SyntaxError:
        return False
    return True


def sample(framework: str, known: Lines, count: int, seed: int) -> list[Mutant]:
    """Returns mutants of lines that cases run; the same ones for one seed."""
    table = {name: each for _, name, each in operators()}
    files = files_of(framework)
    found = []
    for each in chosen([*candidates(framework, known)], count, seed):
        before = files[each.file].read_text(encoding="utf-8")
        text = mutate_code(before, table[each.operator], each.occurrence)
        if text is None or text == before or not _is_python(text):
            continue
        differ = (b for a, b in zip(before.splitlines(), text.splitlines(), strict=False) if a != b)
        found.append(dataclasses.replace(each, text=text, after=next(differ, "").strip()))
    return found
