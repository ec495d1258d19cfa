"""Where code finds a tensor: the way to it from a module, a class, a global or a closure.

Containers and objects on the way are those that are there when it is gone: a script may make them
anew. Only what is at its end is put there for a while: a tensor, or a list or tuple around some.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import nn

from smdistributed.modelparallel.torch.state import holders
from smdistributed.modelparallel.torch.state.holders import MISSING, Holder

#: The key of what is in a cell.
CONTENT = "cell_contents"


class Step(NamedTuple):
    """One step of the way.

    Attributes:
        kind: "item" of a dict, or of the names of a module, a class or a namespace; "attribute" or
            "slot" of an object.
        key: which.
    """

    kind: str
    key: Any


class Spot(NamedTuple):
    """The way to something.

    Attributes:
        root: where it begins: the attributes of a module, a namespace, a class, a cell.
        steps: the way.
        name: the same on every rank.
    """

    root: Any
    steps: tuple[Step, ...]
    name: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spot) and self.root is other.root and self.steps == other.steps

    def __hash__(self) -> int:
        return hash((id(self.root), self.steps))

    @property
    def place(self) -> tuple[int, Any]:
        """The identity of the container at its end, and the key in that.

        Raises:
            LookupError: something on the way is not there.
        """
        return id(self._container()), self.steps[-1].key

    def starts_at(self, root: Any, key: Any) -> bool:
        """Whether the way begins with an entry of something."""
        return self.root is root and self.steps[0].key == key

    def read(self) -> Any:
        """Returns what is there; ``MISSING`` if the way does not lead there."""
        try:
            return _read(self._container(), self.steps[-1])
        except LookupError:
            return MISSING

    @contextlib.contextmanager
    def showing(self, content: Any) -> Iterator[None]:
        """Has something else there for a while.

        Raises:
            LookupError: something on the way is not there.
        """
        container, last = self._container(), self.steps[-1]
        before = _read(container, last)
        _put(container, last, content)
        try:
            yield
        finally:
            _put(container, last, before)

    def _container(self) -> Any:
        found = self.root
        for step in self.steps[:-1]:
            found = _read(_entered(found, step), step)
        return _entered(found, self.steps[-1])


def _entered(obj: Any, step: Step) -> Any:
    """Returns what has the entry that a step goes to."""
    if step.kind == "attribute":
        entries = getattr(obj, "__dict__", None)
        if not isinstance(entries, dict):
            raise LookupError(step.key)
        return entries
    if step.kind == "slot" and not isinstance(obj, step.key.__objclass__):
        raise LookupError(step.key)
    if step.kind == "item" and not isinstance(obj, dict | type | types.CellType):
        raise LookupError(step.key)
    return obj


def _read(container: Any, step: Step) -> Any:
    if step.kind == "slot":
        return holders.SLOTS.read(container).get(step.key, MISSING)
    if isinstance(container, type):
        return vars(container).get(step.key, MISSING)
    if isinstance(container, types.CellType):
        return holders.CELL.read(container)
    return dict.get(container, step.key, MISSING)


def _put(container: Any, step: Step, content: Any) -> None:
    is_gone = content is MISSING
    if step.kind == "slot":
        step.key.__delete__(container) if is_gone else step.key.__set__(container, content)
    elif isinstance(container, type):
        if is_gone:
            type.__delattr__(container, step.key)
        else:
            type.__setattr__(container, step.key, content)
    elif isinstance(container, types.CellType):
        if is_gone:
            del container.cell_contents
        else:
            container.cell_contents = content
    elif is_gone:
        dict.pop(container, step.key, None)
    else:
        dict.__setitem__(container, step.key, content)


class Found(NamedTuple):
    """A place that has a tensor.

    Attributes:
        spot: the way to it.
        content: what is there, lists copied as they were.
        lists: the identities of these.
    """

    spot: Spot
    content: Any
    lists: Set[int]


def name_of_key(key: Any, place: int) -> str:
    """Returns a name of an entry that is the same on every rank.

    Numbers and objects may stand for something by its identity, such as ``id(module)``, which
    differs between processes: they are named by their place among the entries.
    """
    return key if isinstance(key, str) else getattr(key, "__name__", f"#{place}")


def spots_of(held: Sequence[Holder], wanted: Set[int]) -> list[Found] | None:
    """Finds tensors in what code can reach.

    Args:
        held: what code can reach.
        wanted: identities of the tensors.

    Returns:
        each place that has some; None if one is where nothing can be put for a while.
    """
    inner = {id(holder.obj): holder for holder in held if not _is_root(holder)}
    pending = [(h, Spot(h.obj, (), h.path), "item") for h in held if _is_root(h)]
    lists = {id(holder.obj): holder.before for holder in held if type(holder.obj) is list}
    found: dict[tuple[int, Any], Found] = {}
    covered: set[int] = set()
    while pending:
        holder, way, kind = pending.pop(0)
        for place, (key, value) in enumerate(_entries(holder)):
            name = f"{way.name}.{name_of_key(key, place)}"
            spot = Spot(way.root, (*way.steps, Step(kind, key)), name)
            inside: set[int] = set()
            content = _as_it_was(value, lists, inside)
            if _has(content, wanted):
                found.setdefault((id(holder.obj), key), Found(spot, content, inside))
                covered |= {id(holder.obj), *inside}
            elif not isinstance(value, nn.Module | type | types.FunctionType):
                attributes = getattr(value, "__dict__", None)
                for obj, how in ((value, ""), (attributes, "attribute")):
                    if (found_in := inner.pop(id(obj), None)) is not None:
                        how = how or ("slot" if found_in.read is holders.SLOTS.read else "item")
                        pending.append((found_in, spot, how))
    if any(id(h.obj) not in covered and _has(_flat(h.before), wanted) for h in held):
        return None
    return list(found.values())


def _is_root(holder: Holder) -> bool:
    is_of_module = holder.owner is not None and holder.owner.attribute == ""
    return (
        is_of_module
        or holder.put_back is holders.put_entries
        or holder.read in (holders.CLASS.read, holders.CELL.read)
    )


def _entries(holder: Holder) -> Iterator[tuple[Any, Any]]:
    """Yields the key and the content of each place that something else can be put into."""
    if holder.read is holders.CELL.read:
        yield CONTENT, holder.before
    elif isinstance(holder.before, dict) and holder.read is not holders.ON_TENSOR.read:
        yield from holder.before.items()


def _has(value: Any, wanted: Set[int]) -> bool:
    if isinstance(value, list | tuple):
        return any(_has(each, wanted) for each in value)
    return id(value) in wanted


def _as_it_was(value: Any, lists: Mapping[int, list[Any]], seen: set[int]) -> Any:
    """Returns a value with the lists in it as they were; these are added to ``seen``."""
    if type(value) is list and id(value) in lists and id(value) not in seen:
        seen.add(id(value))
        return [_as_it_was(each, lists, seen) for each in lists[id(value)]]
    if type(value) is tuple:
        return tuple([_as_it_was(each, lists, seen) for each in value])
    return value


def _flat(before: Any) -> Any:
    """Returns what is in a holder as a list, or as it is."""
    return list(before.values()) if isinstance(before, dict) else before
