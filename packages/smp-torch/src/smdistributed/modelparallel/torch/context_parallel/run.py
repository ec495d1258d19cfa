"""Running a step for the own piece of each sequence.

What no parameter has met is computed on every rank as for the whole sequence: positions, masks,
labels. What a parameter meets is cut, if the result is then that of the whole, cut; from there on
each rank has its piece. A call that is made for the first time is proven before it is made; what
cannot be is refused, by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.context_parallel.actions import gives_copies
from smdistributed.modelparallel.torch.context_parallel.calls import Call, Length, results_of
from smdistributed.modelparallel.torch.context_parallel.gathering import Copies
from smdistributed.modelparallel.torch.context_parallel.layout import (
    Layout,
    sequence_of,
)
from smdistributed.modelparallel.torch.context_parallel.proving import (
    Proofs,
    Prover,
)
from smdistributed.modelparallel.torch.context_parallel.refusals import name_of, refused_call
from smdistributed.modelparallel.torch.context_parallel.seeing import RunMode
from smdistributed.modelparallel.torch.context_parallel.way import (
    ARGUMENTS,
    Held,
    Made,
    OfWholeSequence,
    Proven,
    Way,
    call_of,
)
from smdistributed.modelparallel.torch.tensors.functions import BACKWARD

#: So many ways of a step function are kept, and proofs of its calls: a number that Python changes
#: in each step makes each of them a new one.
_MOST_WAYS = 64
_MOST_PROOFS = 4096


_CHANGES_COPY = (
    "changes some tokens of a sequence in place, of which this rank has a copy, and not the tensor "
    "that they are taken from: compute another tensor of them"
)


class Ways:
    """What is known of the calls of one body: a step function, or a part of it.

    Args:
        proofs: of the step function.
    """

    def __init__(self, proofs: Proofs) -> None:
        self.proofs = proofs
        self.known: list[Way] = []

    def add(self, way: Way) -> None:
        """Takes a way that is new, and forgets what nobody takes any more."""
        del self.known[:-_MOST_WAYS]
        if len(self.proofs.found) > _MOST_PROOFS:
            self.proofs.found.clear()
        self.known.append(way)


class PieceRun(RunMode):
    """Makes the calls of a body in one microbatch, for the own piece of its sequences.

    Args:
        ways: of the body.
        arguments: tensors that the body is given, with what this rank has of them.
        length: of the sequences.
        most: as many numbers of whole sequences as every rank has anyway.
        look: runs the body for the whole, and returns its calls.

    Attributes:
        group: the ranks that share the sequences.
        length: of these.
        number: of the next call.
        looked: at the whole, to take a way that is new; None if all that was done is known.
    """

    def __init__(
        self,
        ways: Ways,
        arguments: Sequence[tuple[torch.Tensor, Held]],
        length: int,
        most: int,
        look: Callable[[], Way],
    ) -> None:
        super().__init__()
        self._ways = ways
        self._proofs = ways.proofs
        self.group = ways.proofs.group
        self.length = length
        self._look = look
        self._way = ways.known[-1] if ways.known else None
        self._made = Made()
        self._arguments = [held for _, held in arguments]
        for number, (each, _) in enumerate(arguments):
            self._made.note(each, ARGUMENTS, number)
        self.number = 0
        self.looked: Way | None = None
        self._copies = Copies()
        self._prover = Prover(self._proofs, length, most)

    # ------------------------------------------------------------------ who calls

    def take(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Makes a call."""
        if function in BACKWARD:
            self.check_whole(args[0], "backward")
            with self.aside():
                return function(*args, **kwargs)
        with self.aside():
            call, tensors = call_of(function, args, kwargs, self._made)
            number, self.number = self.number, self.number + 1
            proven = self._proven(number, call, tensors)
            copies = self._copies.among(tensors)
            result = proven.action.run(self.group, function, call.spec, call.leaves, tensors)
            if any(version_of(each) != before for each, before in copies):
                raise refused_call(function, _CHANGES_COPY)
            results = results_of(result)
            if len(results) != len(proven.results):
                raise refused_call(function, "gives another number of tensors than before")
            for place, (each, held) in enumerate(zip(results, proven.results, strict=True)):
                self._made.note(each, number, place)
                if held.is_piece:
                    self._proofs.pieces[each] = held
            if gives_copies(proven.action):
                self._copies.note(results)
            return result

    # ------------------------------------------------------------------ what is known

    def proven(self, number: int) -> Proven | None:
        """Returns what is known of a call that was made; None if it was not."""
        if self._way is None or number >= len(self._way.proven):
            return None
        return self._way.proven[number]

    def held(self, tensor: torch.Tensor) -> Held:
        """Returns what this rank has of a tensor."""
        makers = self._made.by(tensor)
        if not makers:
            return Held(tensor.shape)
        call, result = max(makers)
        if call == ARGUMENTS:
            return self._arguments[result]
        assert self._way is not None
        held = self._way.proven[call].results[result]
        # Data may say how large it is, as of tokens that are chosen.
        return held if held.is_piece or held.whole == tensor.shape else Held(tensor.shape)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the whole of a tensor that the step returns. Collective: CP_GROUP."""
        held = self.held(tensor)
        if not held.is_piece:
            if tensor in self._proofs.pieces:
                raise refused_call("return", "gives a piece of an earlier microbatch")
            return tensor
        assert held.layout is not None
        size = held.whole[held.layout.dim]
        return self.group.whole(tensor.detach(), size, held.layout)

    def check_whole(self, tensors: Any, name: str) -> None:
        """Raises if something is a piece.

        Raises:
            UnsupportedError: it is.
        """
        for each in results_of(tensors):
            if self.held(each).is_piece:
                raise refused_call(
                    name,
                    "is called for a tensor of which each rank has a piece: give its sum, "
                    "or its mean",
                )

    def lengths(self) -> list[Length]:
        """Returns how long the sequences are that were computed of; first of the arguments."""
        size = self.group.size
        found = [(sequence_of(0, self.length, size), self.length)]
        for each in () if self._way is None else self._way.proven:
            for held in each.results:
                if held.is_piece and held.layout is not None and held.layout.window is not None:
                    window = held.layout.window
                    found.append((Layout(0, 1, window), len(window)))
        return [
            Length(length, tuple(layout.size_of(length, rank, size) for rank in range(size)))
            for layout, length in dict.fromkeys(found)
        ]

    @property
    def own_length(self) -> int:
        """How many tokens of a sequence this rank has."""
        size = self.group.size
        return sequence_of(0, self.length, size).size_of(self.length, self.group.rank, size)

    @property
    def has_pieces(self) -> bool:
        """Whether something was computed of which a rank has a piece."""
        way = self._way
        return way is not None and any(
            held.is_piece for each in way.proven for held in each.results
        )

    def _proven(self, number: int, call: Call, tensors: Sequence[torch.Tensor]) -> Proven:
        for tensor, makers in zip(tensors, call.makers, strict=True):
            if not makers and tensor in self._proofs.pieces:
                raise refused_call(
                    call.function,
                    "reads a piece of a sequence that an earlier microbatch has left: keep no "
                    "tensors of a sequence from one microbatch for the next",
                )
        way = self._way
        if way is not None and number < len(way.proven):
            if way.proven[number].call == call:
                return way.proven[number]
            way = self._other_way(number, call)
            if number < len(way.proven):
                return way.proven[number]
        elif way is None:
            way = self._way = self._new_way(0)
        if number == len(way.wholes):
            raise refused_call(call.function, "is not called for the whole sequence")
        proven = self._prove(way.wholes[number], call, tensors)
        way.wholes[number].outside.clear()
        way.proven.append(proven)
        return proven

    def _other_way(self, number: int, call: Call) -> Way:
        """Takes the way that leaves the present one at a call."""
        assert self._way is not None
        before = self._way.proven[:number]
        for each in self._ways.known:
            at = each.proven
            if len(at) > number and at[number].call == call and at[:number] == before:
                self._way = each
                break
        else:
            self._way = self._new_way(number)
        return self._way

    def _new_way(self, number: int) -> Way:
        """Runs the microbatch for the whole; the first calls are those made already."""
        with self.aside():
            way = self.looked = self._look()
        if self._way is not None:
            before = [each.call for each in self._way.wholes[:number]]
            if [each.call for each in way.wholes[:number]] != before:
                raise refused_call(
                    "the step", "does not do the same when it runs again with the same arguments"
                )
            way.proven = self._way.proven[:number]
        self._ways.add(way)
        return way

    # ------------------------------------------------------------------ proving

    def _prove(self, whole: OfWholeSequence, call: Call, tensors: Sequence[torch.Tensor]) -> Proven:
        function = call.function
        if not call.is_alike(whole.call):
            raise refused_call(
                function,
                "is called for a piece of the sequence, where for the whole it is "
                f"{name_of(whole.call.function)}, or with other arguments: code decides by the "
                "length of the sequence",
            )
        held = [self.held(each) for each in tensors]
        self._check_outside(whole, call, tensors)
        for each, (shape, _) in zip(held, whole.call.shapes, strict=True):
            if each.whole != shape:
                raise refused_call(
                    function, f"gets a tensor of {tuple(each.whole)}, for the whole {tuple(shape)}"
                )
        return self._prover.prove(whole, call, tensors, held)

    def _check_outside(
        self, whole: OfWholeSequence, call: Call, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Raises where code for a piece uses another tensor, made by nothing that is seen."""
        for number, (tensor, makers) in enumerate(zip(tensors, call.makers, strict=True)):
            other = whole.outside.get(number)
            if makers or other is None or other is tensor:
                continue
            if other.shape != tensor.shape or not torch.equal(other, tensor):
                raise refused_call(
                    call.function,
                    f"gets a tensor of shape {tuple(tensor.shape)} that no function of PyTorch has "
                    "made that is seen, and that is another one for the whole sequence",
                )
