"""What passes hold in memory: found while the forward pass runs on fakes, and differentiated there.

Whoever records keeps all fakes, so that nothing is freed while the forward pass runs. What is there
at a time is known afterwards: memory that an operation makes is there until its last use, and what
autograd keeps until the backward pass has used it. The backward pass runs on fakes too, if no code
of the user's would run in it; there nobody keeps anything but autograd, and memory goes when it
goes in a job.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from smdistributed.modelparallel.common.planning.pass_memory import PassMemory
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.compat.private.tensors import has_memory, storage_of
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec

logger = logging.getLogger(__name__)

#: Operations from one of a tape to before another one.
Span = tuple[int, int]


@dataclass(eq=False)
class _Memory:
    """Memory that an operation made.

    Attributes:
        num_bytes: its size.
        born: the operation.
        uses: those that read it or write to it.
        kept: what autograd keeps of it.
    """

    num_bytes: int
    born: int
    uses: list[int] = field(default_factory=list)
    kept: list[_Keeping] = field(default_factory=list)


@dataclass(eq=False)
class _Keeping:
    """How long autograd keeps a tensor.

    Attributes:
        at: the operation for whose gradient it does.
        freed: in how many operations of the backward pass it is free again; None if it is not.
    """

    at: int
    freed: int | None = None


class Kept(NamedTuple):
    """What autograd is given to keep in the place of a fake.

    It holds no fake, of which whoever records counts the holders. Another one like it does as well.

    Attributes:
        fake: as long as it is there.
        spec: of the fake.
        keeping: how long it is kept.
    """

    fake: weakref.ref[torch.Tensor]
    spec: TensorSpec
    keeping: _Keeping

    def tensor(self) -> torch.Tensor:
        """Returns the fake, or one like it."""
        found = self.fake()
        return self.spec.empty(self.spec.device) if found is None else found


class _Product(NamedTuple):
    """A product with a weight, whose gradient may be computed later than others.

    Attributes:
        at: the operation.
        read: identities of the memory that it reads.
        given_bytes: of what it gives.
        weight_bytes: of the weight.
    """

    at: int
    read: tuple[int, ...]
    given_bytes: int
    weight_bytes: int


class PassTape:
    """The operations of one microbatch.

    Args:
        not_kept: memory that is there anyhow: that of parameters and buffers.
    """

    def __init__(self, not_kept: Container[int]) -> None:
        self._not_kept = not_kept
        self.num_operations = 0
        #: All that autograd keeps.
        self.kept_bytes = 0
        self._known: dict[int, _Memory] = {}
        #: What autograd keeps of what the microbatch is given, by its number: the sizes.
        self._given: dict[int, int] = {}
        self._memories: list[_Memory] = []
        self._products: list[_Product] = []
        self.backward = _BackwardTape()

    # ------------------------------------------------------------------ the forward pass

    def note(
        self, given: Iterable[torch.Tensor], made: Sequence[torch.Tensor], weight_bytes: int = 0
    ) -> None:
        """Takes note of an operation.

        Args:
            given: what it reads or writes, as far as it has memory.
            made: what it returns, likewise.
            weight_bytes: of a product with a weight, the size of that.
        """
        at = self.num_operations
        self.num_operations += 1
        read = set(map(storage_of, given))
        for number in read:
            if (memory := self._known.get(number)) is not None:
                memory.uses.append(at)
        for tensor in made:
            number = storage_of(tensor)
            if number not in read and number not in self._not_kept:
                # Of a view the whole is known; a number is given again when its memory is gone.
                memory = _Memory(tensor.untyped_storage().nbytes(), at)
                self._known[number] = memory
                self._memories.append(memory)
        if weight_bytes and made:
            size = made[0].numel() * made[0].element_size()
            self._products.append(_Product(at, tuple(map(id, self._of(read))), size, weight_bytes))

    def _of(self, numbers: Iterable[int]) -> Iterator[_Memory]:
        return (self._known[number] for number in numbers if number in self._known)

    def keep(self, tensor: torch.Tensor) -> Kept | torch.Tensor:
        """Returns what autograd is to keep for a backward pass in the place of a tensor."""
        if not isinstance(tensor, FakeTensor):
            # As it is, what an operation gives would be kept by what it keeps itself.
            return tensor.detach() if tensor.grad_fn is not None else tensor
        if not has_memory(tensor) or (number := storage_of(tensor)) in self._not_kept:
            return tensor
        keeping = _Keeping(self.num_operations)
        memory = self._known.get(number)
        if memory is not None and not self.backward.is_running:
            if not memory.kept:
                self.kept_bytes += memory.num_bytes
            memory.kept.append(keeping)
        elif memory is None and number not in self._given:
            self._given[number] = tensor.untyped_storage().nbytes()
            self.kept_bytes += self._given[number]
        return Kept(weakref.ref(tensor), TensorSpec.of(tensor), keeping)

    def give(self, kept: Kept | torch.Tensor) -> torch.Tensor:
        """Returns what autograd has kept, or what is like it."""
        if not self.backward.is_running:
            return kept.tensor() if isinstance(kept, Kept) else kept
        if isinstance(kept, torch.Tensor):
            self.backward.leave_out(kept)
            return kept
        with self.backward.paused():
            self.backward.note_used(kept.keeping)
            tensor = kept.tensor()
        self.backward.leave_out(tensor)
        return tensor

    def put_back(self, num_operations: int) -> None:
        """Forgets what came after some operations."""
        if num_operations == self.num_operations:
            return
        self.num_operations = num_operations
        self._memories = [each for each in self._memories if each.born < num_operations]
        for each in self._memories:
            each.uses = [use for use in each.uses if use < num_operations]
            each.kept = [kept for kept in each.kept if kept.at < num_operations]
        made = sum(each.num_bytes for each in self._memories if each.kept)
        self.kept_bytes = made + sum(self._given.values())
        self._products = [each for each in self._products if each.at < num_operations]

    # ------------------------------------------------------------------ the backward pass

    def differentiate(self, root: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
        """Differentiates what was computed, on fakes; graphs stay.

        Args:
            root: a number.
            leaves: the parameters.
        """
        try:
            with self.backward.running(self.num_operations - 1):
                gradients = torch.autograd.grad(root, leaves, retain_graph=True, allow_unused=True)
                self.backward.add_up([each for each in gradients if each is not None])
        except Exception:  # what has no gradient on fakes may have one in a job
            logger.debug("the memory of a backward pass is not known", exc_info=True)
            self.backward = _BackwardTape()

    def memory(self, spans: Iterable[Span]) -> PassMemory:
        """Returns what the passes of a part of the microbatch hold.

        Args:
            spans: its operations.
        """
        within = _Within(spans)
        forward: dict[int, int] = {}
        kept: dict[int, tuple[int | None, int]] = {}
        for each in self._memories:
            first, last = within.reach(each.born, each.uses)
            inside = [one for one in each.kept if within.has(one.at)]
            if inside:
                ends = [one.freed for one in inside]
                freed = None if None in ends else max(one for one in ends if one is not None)
                kept[id(each)] = freed, each.num_bytes
                first = min(one.at for one in inside) if first is None else first
                last = within.end
            if first is not None and last is not None:
                forward[first] = forward.get(first, 0) + each.num_bytes
                forward[last] = forward.get(last, 0) - each.num_bytes
        kept_bytes = sum(num_bytes for _, num_bytes in kept.values())
        most_forward = max(itertools.accumulate(forward[at] for at in sorted(forward)), default=0)
        products = [each for each in self._products if within.has(each.at)]
        read = {number for each in products for number in each.read if number in kept}
        return PassMemory(
            kept_bytes,
            max(most_forward, kept_bytes),
            # Without a backward pass: the gradient of each tensor is as large as the tensor.
            self.backward.most(within, list(kept.values())) or 2 * max(most_forward, kept_bytes),
            self.backward.most(
                within,
                [(None if key in read else freed, size) for key, (freed, size) in kept.items()],
                [(each.at, each.given_bytes) for each in products],
            )
            or 2 * max(most_forward, kept_bytes),
            sum(kept[number][1] for number in read) + sum(each.given_bytes for each in products),
            max((each.weight_bytes for each in products), default=0),
        )

    def close(self) -> None:
        """Takes note that the microbatch is over."""
        for each in self._memories:
            # What autograd keeps between two operations one has given, or the other is given.
            between = [kept for kept in each.kept if kept.at == each.born + 1]
            if len(between) > 1 or each.born + 1 not in each.uses:
                for kept in between[:1]:
                    kept.at = each.born
        self._known.clear()


class _Within:
    """The operations of a part of a microbatch.

    Args:
        spans: from one to before another one.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        merged: list[list[int]] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            elif end > start:
                merged.append([start, end])
        self._starts = [start for start, _ in merged]
        self._ends = [end for _, end in merged]

    @property
    def end(self) -> int:
        """Behind all of them."""
        return self._ends[-1] if self._ends else 0

    def has(self, operation: int) -> bool:
        """Whether an operation is one of them."""
        place = bisect.bisect_right(self._starts, operation) - 1
        return place >= 0 and operation < self._ends[place]

    def reach(self, born: int, uses: Sequence[int]) -> tuple[int | None, int | None]:
        """Returns from which operation to before which one memory is there."""
        inside = [each for each in uses if self.has(each)]
        if self.has(born):
            later = bool(uses) and uses[-1] >= self.end
            return born, self.end if later else max([born, *inside]) + 1
        return (inside[0], inside[-1] + 1) if inside else (None, None)


class _BackwardTape:
    """The operations of backward passes, and the memory that is there at each.

    Attributes:
        is_running: a backward pass runs.
    """

    def __init__(self) -> None:
        self.is_running = False
        self._is_paused = False
        self._position = 0
        #: Of each operation, where in the forward pass it belongs.
        self._positions: list[int] = []
        self._used: list[tuple[int, _Keeping]] = []
        #: By the number of the memory: from which operation on it is there, and its size.
        self._alive: dict[int, tuple[int, int]] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        #: How much there is more from an operation on.
        self._changes: dict[int, int] = {}

    @contextlib.contextmanager
    def running(self, position: int) -> Iterator[None]:
        """Inside, a backward pass runs.

        Args:
            position: in the forward pass, where it begins.
        """
        self._position, self.is_running = position, True
        try:
            yield
        finally:
            self.is_running = False
            self._settle(ends=True)

    def note(self, made: Iterable[torch.Tensor]) -> None:
        """Takes note of an operation.

        Args:
            made: what it returns, as far as it has memory.
        """
        tensors = list(made)
        if self._is_paused or not tensors:
            return
        now = len(self._positions)
        self._positions.append(self._position)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if self._watch(storage):
                self._alive[storage._cdata] = now, storage.nbytes()
                self._change(now, storage.nbytes())

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Takes note of a tensor that the forward pass has made."""
        if has_memory(tensor):
            self._watch(tensor.untyped_storage())

    def _watch(self, storage: torch.UntypedStorage) -> bool:
        """Watches memory; returns whether it is new."""
        number = storage._cdata
        if number in self._watched:
            return False
        self._watched[number] = weakref.ref(storage, self._freeing(number))
        return True

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, what is made is there already."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _freeing(self, number: int) -> Callable[[object], None]:
        def free(_: object) -> None:
            self._watched.pop(number, None)
            if (found := self._alive.pop(number, None)) is not None:
                self._change(max(len(self._positions), found[0] + 1), -found[1])

        return free

    def _change(self, at: int, num_bytes: int) -> None:
        self._changes[at] = self._changes.get(at, 0) + num_bytes

    def note_used(self, kept: _Keeping) -> None:
        """Takes note that autograd takes what it keeps."""
        self._settle()
        # What came after the operation whose gradient this is, is over.
        self._position = min(kept.at, self._position)
        self._used.append((len(self._positions), kept))

    def _settle(self, *, ends: bool = False) -> None:
        """Has what was used be free, if operations have come since."""
        now = len(self._positions)
        for used, kept in self._used:
            if used < now or ends:
                kept.freed = now
        self._used = [] if ends else [each for each in self._used if each[0] == now]

    def add_up(self, gradients: Sequence[torch.Tensor]) -> None:
        """Takes note that gradients are added to those of parameters when they are there."""
        for each in gradients:
            number = each.untyped_storage()._cdata
            if (found := self._alive.pop(number, None)) is not None:
                self._change(found[0] + 1, -found[1])

    def most(
        self,
        within: _Within,
        kept: Sequence[tuple[int | None, int]],
        waiting: Sequence[tuple[int, int]] = (),
    ) -> int | None:
        """Returns the most that is there in the backward pass of a part; None if it is not known.

        Args:
            within: its operations.
            kept: before which operation here what it kept is free again, and how large it was.
            waiting: whose gradient is kept when it has been used, and how large that is.
        """
        if not any(map(within.has, self._positions)):
            return None
        gone: dict[int, int] = {}
        for at, num_bytes in kept:
            if at is not None:
                gone[at] = gone.get(at, 0) + num_bytes
        later = sorted(waiting)
        alive = most = sum(num_bytes for _, num_bytes in kept)
        for operation, position in enumerate(self._positions):
            alive += self._changes.get(operation, 0) - gone.get(operation, 0)
            while later and position < later[-1][0]:
                alive += later.pop()[1]
            if within.has(position):
                most = max(most, alive)
        return most
