"""Undoing what a leaf did to Python state while it ran on fakes.

A leaf runs on fakes once, when it is recorded, and for real in every step. So whatever it changes
on fakes is put back: attributes of its modules, containers and objects that can be reached from
them, attributes of classes, globals and closures of its code. State that only C code can see cannot
be put back; where such an object shows that it has moved on, the leaf is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from typing import Any, NamedTuple

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.state import holders
from smdistributed.modelparallel.torch.state.growth import Growth, added_to, is_growth
from smdistributed.modelparallel.torch.state.holders import MISSING, Holder, Owner
from smdistributed.modelparallel.torch.state.identities import Identities
from smdistributed.modelparallel.torch.state.reach import OF_MODULES, Reach
from smdistributed.modelparallel.torch.state.spots import CONTENT, Found, Spot, spots_of

#: What a change of is seen in other ways, or changes no number.
_OWN_ATTRIBUTES = OF_MODULES | {""}


#: The identity of what can be changed, and for a namespace the name in it.
Place = tuple[int, str | None]


class Change(NamedTuple):
    """Something that a leaf changed.

    Attributes:
        owner: the attribute of a module by which it is reached; None if it is shared.
        path: names it.
        places: where it is.
        before: what was there.
        now: what is there now.
        added: what was added, if nothing else changed: a log, or a cache; else None.
    """

    owner: Owner | None
    path: str
    places: frozenset[Place]
    before: Any
    now: Any
    added: Mapping[Any, Any] | None


class Difference(NamedTuple):
    """Something that is not as it was in a snapshot.

    Attributes:
        holder: what it was.
        now: what is in it now.
    """

    holder: Holder
    now: Any

    @property
    def places(self) -> set[tuple[int, Any]]:
        """The identity of what has changed with each key that has; None for the whole."""
        before, identity = self.holder.before, id(self.holder.obj)
        if self.holder.read is holders.CELL.read:
            return {(identity, CONTENT)}
        if not isinstance(before, dict):
            return {(identity, None)}
        return {
            (identity, key)
            for key in {**before, **self.now}
            if before.get(key, MISSING) is not self.now.get(key, MISSING)
        }


@contextlib.contextmanager
def as_it_was(differences: Sequence[Difference]) -> Iterator[None]:
    """Puts things back for a while.

    Raises:
        UnsupportedError: something cannot be put back.
    """
    for holder, _ in differences:
        if holder.put_back is None or holder.put_back is holders.TENSOR.put_back:
            raise UnsupportedError(f"{holder.path} cannot be put back")
    try:
        for holder, _ in differences:
            holder.put_back(holder.obj, holder.before)  # type: ignore[misc]
        yield
    finally:
        for holder, now in differences:
            holder.put_back(holder.obj, now)  # type: ignore[misc]


class Snapshot:
    """The Python state that modules and code can reach.

    Args:
        modules: they, and their code.
        code: other functions.
        apart_from: what is not looked into: modules, functions.
        moved: identities of tensors that the library itself moves, and that do not count.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        code: Iterable[Callable[..., Any]] = (),
        apart_from: Iterable[object] = (),
        moved: Container[int] = (),
    ) -> None:
        self._modules = modules = dict.fromkeys(modules)
        reach = Reach(modules, code, apart_from, moved)
        self._holders = reach.holders
        #: What has changed, and what is in it now.
        self._changed: list[tuple[Holder, Any]] = []
        self._outer = [
            holder
            for holder in self._holders
            if holder.owner is None
            or holder.owner.attribute not in _OWN_ATTRIBUTES
            or holder.read is holders.ON_TENSOR.read
            or (holder.owner.attribute == "" and holder.owner.module not in modules)
        ]
        #: Of these, once nothing was another: what is compared in one go, and the rest.
        self._unchanged: tuple[Identities, list[Holder]] | None = None

    def note_changes(self) -> list[Change]:
        """Returns what has changed since; only that is put back later."""
        changes: list[Change] = []
        self._changed = []
        for holder in self._holders:
            now = holder.read(holder.obj)
            if not holders.same(holder.before, now):
                self._changed.append((holder, now))
                changes += self._named(holder, now)
        return changes

    def forget(self, other: Snapshot, *, but_for: Snapshot) -> None:
        """Looks no longer at what is in another snapshot, and not in a third one."""
        gone = other.places() - but_for.places()
        for holder in self._holders:
            if holder.put_back is holders.put_entries:
                now = holder.read(holder.obj)
                names = {name for identity, name in gone if identity == id(holder.obj)}
                holder.before.update({name: now[name] for name in names & now.keys()})
        self._holders = [each for each in self._holders if not gone.issuperset(_places(each))]
        self._outer = [each for each in self._outer if not gone.issuperset(_places(each))]
        self._unchanged = None

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors outside of modules' parameters and buffers."""
        return [each.obj for each in self._holders if each.read is holders.TENSOR.read]

    def spots_of(self, wanted: Set[int]) -> list[Found] | None:
        """Returns where tensors are, by their identities: see ``spots.spots_of``."""
        return spots_of(self._holders, wanted)

    def content(self, spot: Spot) -> Any:
        """Returns what was at the end of a way that leads where it led; else ``MISSING``."""
        with contextlib.suppress(LookupError):
            identity, key = spot.place
            for holder in self._holders:
                if id(holder.obj) == identity and isinstance(holder.before, dict):
                    return holder.before.get(key, MISSING)
                if id(holder.obj) == identity and holder.read is holders.CELL.read:
                    return holder.before
        return MISSING

    def places(self) -> set[Place]:
        """Returns where all of it is."""
        return {place for holder in self._holders for place in _places(holder)}

    @property
    def noted(self) -> list[Difference]:
        """What was found to have changed, and what was in it then."""
        return [Difference(*each) for each in self._changed]

    @property
    def has_written(self) -> bool:
        """Whether a tensor outside of modules' parameters and buffers was found to have changed."""
        return any(holder.read is holders.TENSOR.read for holder, _ in self._changed)

    @property
    def changed(self) -> set[int]:
        """The identities of what was found to have changed."""
        return {
            id(holder.obj)
            for holder, _ in self._changed
            # Of the attributes of a module around, code outside may have changed others.
            if holder.owner is None or holder.owner.attribute != ""
        }

    def put_all_back(self) -> None:
        """Puts back all that was found to have changed, containers and what is in them included.

        Raises:
            UnsupportedError: something cannot be put back.
        """
        for holder, _ in reversed(self._changed):
            if holder.put_back is None:
                raise UnsupportedError(
                    f"{holder.path} moves on in a step that is only looked at, and cannot be put "
                    f"back (a {type(holder.obj).__name__}): plan by smp-launch plan, which runs "
                    "the script for nothing else."
                )
            holder.put_back(holder.obj, holder.before)

    def put_back(self) -> list[Growth]:
        """Puts back what was found to have changed, but for what was put into containers.

        Returns:
            what was put into shared ones, and of tensors into the modules' own: code outside may
            read it before the microbatch is over.

        Raises:
            UnsupportedError: something cannot be put back.
        """
        grown = []
        for holder, now in reversed(self._changed):
            is_container = not self._is_looked_after(holder)
            if is_container and is_growth(holder.obj, holder.before, now):
                is_own = not self._is_of_others(holder)
                growth = Growth.of(holder.path, holder.obj, holder.before, now, is_own=is_own)
                if not is_own or growth.is_of_tensors:
                    grown.append(growth)
                    continue
            if holder.put_back is None:
                raise UnsupportedError(
                    f"{holder.path} moves on when the module that has it runs, and cannot be put "
                    f"back (a {type(holder.obj).__name__}); a module is tried out before it runs "
                    "in a step. Keep a number and compute from it instead."
                )
            holder.put_back(holder.obj, holder.before)
        return grown

    def _is_looked_after(self, holder: Holder) -> bool:
        """Whether it is a module's own attribute, or what any module has, such as its buffers."""
        return (
            holder.owner is not None
            and holder.owner.attribute in _OWN_ATTRIBUTES
            and not self._is_of_others(holder)
        )

    def _is_of_others(self, holder: Holder) -> bool:
        return holder.owner is None or holder.owner.module not in self._modules

    def differences(self, apart_from: Collection[int] = ()) -> list[Difference]:
        """Returns what is another now outside the modules' own attributes.

        Args:
            apart_from: identities of what does not count.
        """
        looked_at = self._outer
        if self._unchanged is not None and self._unchanged[0].are_current():
            looked_at = self._unchanged[1]
        found = [
            Difference(holder, now)
            for holder in looked_at
            if id(holder.obj) not in apart_from
            and not holders.same(holder.before, now := holder.read(holder.obj))
        ]
        if looked_at is self._outer and not found and not apart_from:
            self._unchanged = holders.in_one_go(self._outer)
        return found

    def _named(self, holder: Holder, now: Any) -> Iterator[Change]:
        if holder.owner is not None and holder.owner.attribute == "":
            for key in {**holder.before, **now}:
                before, value = holder.before.get(key, MISSING), now.get(key, MISSING)
                if value is before:
                    continue
                owner, path = Owner(holder.owner.module, key), f"{holder.path}.{key}"
                if self._is_of_others(holder) and isinstance(value, torch.Tensor):
                    yield Change(owner, path, _places(holder), before, value, {key: value})
                else:
                    yield Change(owner, path, frozenset(), before, value, None)
        else:
            grows = is_growth(holder.obj, holder.before, now)
            added = added_to(holder.before, now) if grows else None
            places = _places(holder, now)
            yield Change(holder.owner, holder.path, places, holder.before, now, added)


def _places(holder: Holder, now: Any = None) -> frozenset[Place]:
    """Returns where something is; of a namespace the names that are others now."""
    if holder.put_back is not holders.put_entries:
        return frozenset({(id(holder.obj), None)})
    return frozenset(
        (id(holder.obj), name)
        for name, value in holder.before.items()
        if now is None or now[name] is not value
    )
