"""What passes hold in memory: found while the forward pass runs on fakes, and differentiated there.

Whoever records keeps all fakes, so that nothing is freed while the forward pass runs. What is there
at a time is known afterwards: memory that an operation makes is there until its last use, and what
autograd keeps until the backward pass has used it. The backward pass runs on fakes too, if no code
of the user's would run in it; there nobody keeps anything but autograd, and memory goes when it
goes in a job.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from smdistributed.modelparallel.common.planning.pass_tape import (
    Keeping,
    Memory,
    PassTape,
    Product,
)
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.compat.private.tensors import has_memory, storage_of
from smdistributed.modelparallel.torch.record.costs.backward_writer import BackwardWriter, KeptFor
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Memory:
    """Memory that an operation made.

    Attributes:
        num_bytes: its size.
        born: the operation.
        uses: those that read it or write to it.
        kept: what autograd keeps of it.
        is_held: by an object that a checkpointed call is given.
    """

    num_bytes: int
    born: int
    uses: list[int] = field(default_factory=list)
    kept: list[KeptFor] = field(default_factory=list)
    is_held: bool = False


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
    keeping: KeptFor

    def tensor(self) -> torch.Tensor:
        """Returns the fake, or one like it."""
        found = self.fake()
        return self.spec.empty(self.spec.device) if found is None else found


class TapeWriter:
    """Takes note of the operations of one microbatch.

    Args:
        not_kept: memory that is there anyhow: that of parameters and buffers.

    Attributes:
        num_operations: of the forward pass.
        names: of these, where they are told.
        kept_bytes: of all that autograd keeps.
        backward: takes note of the backward pass.
    """

    def __init__(self, not_kept: Container[int]) -> None:
        self._not_kept = not_kept
        self.num_operations = 0
        self.names: list[str] = []
        self.kept_bytes = 0
        self._known: dict[int, _Memory] = {}
        #: What autograd keeps of what the microbatch is given, by its number: the sizes.
        self._given: dict[int, int] = {}
        self._memories: list[_Memory] = []
        self._products: list[Product] = []
        self.backward = BackwardWriter()

    # ------------------------------------------------------------------ the forward pass

    def note(
        self,
        given: Iterable[torch.Tensor],
        made: Sequence[torch.Tensor],
        weight_bytes: int = 0,
        name: str = "",
    ) -> None:
        """Takes note of an operation.

        Args:
            given: what it reads or writes, as far as it has memory.
            made: what it returns, likewise.
            weight_bytes: of a product with a weight, the size of that.
            name: of the operation.
        """
        at = self.num_operations
        self.num_operations += 1
        self.names.append(name)
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
            self._products.append(Product(at, tuple(map(id, self._of(read))), size, weight_bytes))

    def _of(self, numbers: Iterable[int]) -> Iterator[_Memory]:
        return (self._known[number] for number in numbers if number in self._known)

    def keep(self, tensor: torch.Tensor) -> Kept | torch.Tensor:
        """Returns what autograd is to keep for a backward pass in the place of a tensor."""
        if not isinstance(tensor, FakeTensor):
            # As it is, what an operation gives would be kept by what it keeps itself.
            return tensor.detach() if tensor.grad_fn is not None else tensor
        if not has_memory(tensor) or (number := storage_of(tensor)) in self._not_kept:
            return tensor
        keeping = KeptFor(self.num_operations)
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

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Takes note of what stays although a call that has made it is computed again.

        Args:
            tensors: of objects that the call was given, which is over.
        """
        for memory in self._of(storage_of(each) for each in tensors if has_memory(each)):
            memory.is_held = True

    def put_back(self, num_operations: int) -> None:
        """Forgets what came after some operations."""
        if num_operations == self.num_operations:
            return
        self.num_operations = num_operations
        del self.names[num_operations:]
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
            self.backward = BackwardWriter()

    def tape(self) -> PassTape:
        """Returns what was noted."""
        places = {id(each): place for place, each in enumerate(self._memories)}
        return PassTape(
            self.num_operations,
            tuple(
                Memory(
                    each.num_bytes,
                    each.born,
                    tuple(each.uses),
                    tuple(Keeping(one.at, one.freed) for one in each.kept),
                    each.is_held,
                )
                for each in self._memories
            ),
            tuple(
                each._replace(read=tuple(places[one] for one in each.read if one in places))
                for each in self._products
            ),
            self.backward.tape(),
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
