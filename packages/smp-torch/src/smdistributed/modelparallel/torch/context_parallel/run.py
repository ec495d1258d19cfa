"""Running a step for the own piece of each sequence.

What no parameter has met is computed on every rank as for the whole sequence: positions, masks,
labels. What a parameter meets is cut, if the result is then that of the whole, cut; from there on
each rank has its piece. A call that is made for the first time is proven before it is made; what
cannot be is refused, by its name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import resolve_name
from torch.utils.weak import WeakIdKeyDictionary

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.context_parallel.actions import (
    OfAttention,
    OfDropout,
    OfGathered,
    OfMeanLoss,
    OfPieces,
    OfWhole,
)
from smdistributed.modelparallel.torch.context_parallel.attention import SDPA, misfit
from smdistributed.modelparallel.torch.context_parallel.calls import (
    Call,
    Form,
    put_together,
    results_of,
    shorter_by_turns,
)
from smdistributed.modelparallel.torch.context_parallel.dropout import is_dropout
from smdistributed.modelparallel.torch.context_parallel.gathering import Copies, of_few
from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup
from smdistributed.modelparallel.torch.context_parallel.layout import Layout
from smdistributed.modelparallel.torch.context_parallel.losses import is_mean_over_tokens, with_sum
from smdistributed.modelparallel.torch.context_parallel.numbers import Given
from smdistributed.modelparallel.torch.context_parallel.proof import (
    Kind,
    Proof,
    Trial,
    divisors,
)
from smdistributed.modelparallel.torch.context_parallel.refusals import refused
from smdistributed.modelparallel.torch.context_parallel.seeing import RunMode
from smdistributed.modelparallel.torch.context_parallel.short import fits, shortened
from smdistributed.modelparallel.torch.context_parallel.way import (
    ARGUMENTS,
    Held,
    Made,
    OfWholeSequence,
    Proven,
    Way,
    call_of,
)
from smdistributed.modelparallel.torch.tensors.functions import (
    BACKWARD,
    GIVING_BACKWARD_CODE,
)

#: So many ways of a step function are kept, and proofs of its calls: a number that Python changes
#: in each step makes each of them a new one.
_MOST_WAYS = 64
_MOST_PROOFS = 4096


_CHANGES_COPY = (
    "changes some tokens of a sequence in place, of which this rank has a copy, and not the tensor "
    "that they are taken from: compute another tensor of them"
)


class _Found(NamedTuple):
    """How a call computes with pieces.

    Attributes:
        leaves: its arguments, with the length of a piece.
        proof: the rest.
    """

    leaves: tuple[Any, ...]
    proof: Proof


class Proofs:
    """What is known of the calls of one step function, whatever makes them.

    Args:
        group: the ranks that share its sequences.
    """

    def __init__(self, group: ContextGroup) -> None:
        self.group = group
        self.found: dict[Any, _Found | None] = {}
        #: Pieces that may outlive the microbatch in which they were made.
        self.pieces: WeakIdKeyDictionary = WeakIdKeyDictionary()


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
                raise self._refused(function, _CHANGES_COPY)
            results = results_of(result)
            if len(results) != len(proven.results):
                raise self._refused(function, "gives another number of tensors than before")
            for place, (each, held) in enumerate(zip(results, proven.results, strict=True)):
                self._made.note(each, number, place)
                if held.is_piece:
                    self._proofs.pieces[each] = held
            if isinstance(proven.action, OfGathered) and proven.action.gives_views:
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
        return self._way.proven[call].results[result]

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the whole of a tensor that the step returns. Collective: CP_GROUP."""
        held = self.held(tensor)
        if not held.is_piece:
            if tensor in self._proofs.pieces:
                raise self._refused("return", "gives a piece of an earlier microbatch")
            return tensor
        assert held.layout is not None
        return self.group.whole(tensor.detach(), held.layout)

    def check_whole(self, tensors: Any, name: str) -> None:
        """Raises if something is a piece.

        Raises:
            UnsupportedError: it is.
        """
        for each in results_of(tensors):
            if self.held(each).is_piece:
                raise self._refused(
                    name,
                    "is called for a tensor of which each rank has a piece: give its sum, "
                    "or its mean",
                )

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
                raise self._refused(
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
            raise self._refused(call.function, "is not called for the whole sequence")
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
                raise self._refused(
                    "the step", "does not do the same when it runs again with the same arguments"
                )
            way.proven = self._way.proven[:number]
        self._ways.add(way)
        return way

    # ------------------------------------------------------------------ proving

    def _prove(self, whole: OfWholeSequence, call: Call, tensors: Sequence[torch.Tensor]) -> Proven:
        function = call.function
        if not call.is_alike(whole.call):
            raise self._refused(
                function,
                "is called for a piece of the sequence, where for the whole it is "
                f"{_name(whole.call.function)}, or with other arguments: code decides by the "
                "length of the sequence",
            )
        held = [self.held(each) for each in tensors]
        self._check_outside(whole, call, tensors)
        for each, (shape, _) in zip(held, whole.call.shapes, strict=True):
            if each.whole != shape:
                raise self._refused(
                    function, f"gets a tensor of {tuple(each.whole)}, for the whole {tuple(shape)}"
                )
        if not any(each.is_piece for each in held):
            return self._of_wholes(whole, call, tensors, held)
        if function in GIVING_BACKWARD_CODE:
            raise self._refused(
                function, "gives code to the backward pass, which would see pieces of gradients"
            )
        args, kwargs = put_together(call.spec, call.leaves, tensors)
        if function is SDPA and self._is_cut_along_keys(args, kwargs):
            return self._of_attention(whole, call, args, kwargs)
        if is_dropout(function, args, kwargs) and held[0].layout is not None:
            action = OfDropout(whole.call.leaves, held[0].whole, held[0].layout)
            return Proven(call, action, (held[0],))
        if is_mean_over_tokens(function, args, kwargs):
            return self._of_mean_loss(whole, call, tensors, held)
        found = self._proof(whole, call, tensors, [self._layouts(each) for each in held])
        if found is None:
            layouts = [each.layout if each.is_piece else None for each in held]
            few = of_few(whole.call, whole.results, layouts, self.group.size)
            if few is None:
                raise self._refused(function, None, tensors, held)
            return Proven(call, few, tuple(map(Held, whole.results)))
        self._check_reads(call, tensors, whole)
        kinds = {each.kind for each in found.proof.results} & {Kind.SUM, Kind.MEAN}
        if kinds and len(found.proof.results) > 1:
            raise self._refused(function, None, tensors, held)
        return self._with(whole, call, held, found, *kinds)

    def _of_wholes(
        self,
        whole: OfWholeSequence,
        call: Call,
        tensors: Sequence[torch.Tensor],
        held: Sequence[Held],
    ) -> Proven:
        """Nothing is cut so far: what a parameter meets is, the rest stays whole."""
        layouts: list[Layout | None] = [None] * len(whole.results)
        if any(each.layout is not None for each in held):
            ways = [(each.layout,) for each in held]
            meets = any(isinstance(each, nn.Parameter) for each in tensors)
            own = call if meets else whole.call
            found = self._proof(whole, own, tensors, ways)
            if found is not None:
                is_cut = [each.kind is Kind.CUT for each in found.proof.results]
                if meets and is_cut and all(is_cut):
                    return self._with(whole, call, held, found)
                layouts = [each.layout for each in found.proof.results]
        results = zip(whole.results, layouts, strict=True)
        return Proven(
            call,
            OfWhole(whole.call.leaves),
            tuple(Held(shape, layout) for shape, layout in results),
        )

    def _with(
        self,
        whole: OfWholeSequence,
        call: Call,
        held: Sequence[Held],
        found: _Found,
        kind: Kind = Kind.CUT,
    ) -> Proven:
        proof = found.proof
        results = tuple(
            Held(shape, each.layout, is_piece=each.kind is Kind.CUT)
            for shape, each in zip(whole.results, proof.results, strict=True)
        )
        return Proven(call, OfPieces(found.leaves, _cuts(held, proof), kind), results)

    def _is_cut_along_keys(self, args: Any, kwargs: Any) -> bool:
        """Whether queries would miss some of the keys."""
        given = dict(zip(("query", "key", "value"), args, strict=False), **kwargs)
        held = self.held(given["key"])
        return held.is_piece and held.layout == Layout(len(held.whole) - 2)

    def _of_attention(self, whole: OfWholeSequence, call: Call, args: Any, kwargs: Any) -> Proven:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False), **kwargs)
        forms = {}
        for name, each in given.items():
            if isinstance(each, torch.Tensor):
                held = self.held(each)
                layout = held.layout if held.is_piece else None
                forms[name] = Form(held.whole, each.shape, layout)
        why = misfit(forms, given)
        if why is not None:
            raise self._refused(call.function, f"cannot be split: {why}")
        layout = forms["query"].layout
        held = Held(whole.results[0], layout, is_piece=layout is not None)
        return Proven(call, OfAttention(whole.call.leaves), (held,))

    def _of_mean_loss(
        self,
        whole: OfWholeSequence,
        call: Call,
        tensors: Sequence[torch.Tensor],
        held: Sequence[Held],
    ) -> Proven:
        args, kwargs = put_together(call.spec, call.leaves, tensors)
        with_own, _ = call_of(call.function, *with_sum(call.function, args, kwargs), self._made)
        wholes = put_together(whole.call.spec, whole.call.leaves, tensors)
        with_whole, _ = call_of(call.function, *with_sum(call.function, *wholes), self._made)
        found = self._proof(
            OfWholeSequence(with_whole, whole.results, {}),
            with_own,
            tensors,
            [self._layouts(each) for each in held],
        )
        if found is None or [each.kind for each in found.proof.results] != [Kind.SUM]:
            raise self._refused(call.function, None, tensors, held)
        return Proven(call, OfMeanLoss(_cuts(held, found.proof)), (Held(whole.results[0]),))

    def _layouts(self, held: Held) -> tuple[Layout | None, ...]:
        """Returns how a tensor may be cut for a call; first what is most likely."""
        if held.is_piece:
            return (held.layout,)
        known = () if held.layout is None else (held.layout,)
        others = (
            Layout(dim, outer)
            for dim, size in enumerate(held.whole)
            if size and size % self.length == 0
            for outer in divisors(size // self.length)
        )
        return tuple(dict.fromkeys([*known, None, *others]))

    def _proof(
        self,
        whole: OfWholeSequence,
        call: Call,
        tensors: Sequence[torch.Tensor],
        layouts: Sequence[tuple[Layout | None, ...]],
    ) -> _Found | None:
        """Returns how a call computes with pieces; None if that was not found.

        Code may have taken the length from a tensor that is whole here, so the arguments are also
        tried with that of a piece in its place.
        """
        held = [self.held(each) for each in tensors]
        # Two arguments may be one tensor.
        same = tuple(next(i for i, t in enumerate(tensors) if t is each) for each in tensors)
        key = (
            *(call.function, call.spec, _as_key(call.leaves), call.shapes),
            *(_as_key(whole.call.leaves), whole.call.shapes, tuple(layouts), same),
        )
        known = self._proofs.found
        if _is_hashable(key) and key in known:
            return known[key]
        given = [
            Given(each.whole, tensor, ways, each.is_piece)
            for each, tensor, ways in zip(held, tensors, layouts, strict=True)
        ]
        found = self._found_short(call, whole, given)
        for leaves in self._arguments_tried(call.leaves, whole.call.leaves):
            if found is None:
                found = self._found(call, whole.call.leaves, leaves, given)
        if _is_hashable(key):
            known[key] = found
        return found

    def _arguments_tried(
        self, own: tuple[Any, ...], whole: tuple[Any, ...]
    ) -> Iterator[tuple[Any, ...]]:
        yield from shorter_by_turns(own, self.length, self.group.size)
        if _as_key(whole) != _as_key(own):  # such as what a mean over the sequence is divided by
            yield whole

    def _found_short(
        self, call: Call, whole: OfWholeSequence, given: Sequence[Given]
    ) -> _Found | None:
        """Returns how a call with a long sequence computes with pieces, if a short one shows it."""
        candidates = shortened(
            call.function,
            call.spec,
            whole.call.leaves,
            call.leaves,
            given,
            self.length,
            self.group.size,
        )
        for short in candidates:
            found = self._found(call, short.whole, short.own, short.given)
            if found is not None and fits(found.proof, whole.results, self.group.size):
                return _Found(call.leaves, found.proof)
        return None

    def _found(
        self,
        call: Call,
        whole: tuple[Any, ...],
        own: tuple[Any, ...],
        given: Sequence[Given],
    ) -> _Found | None:
        trial = Trial(
            call.function,
            call.spec,
            whole,
            own,
            given,
            self.group.size,
            backward=_has_backward_code(call.function),
        )
        proof = trial.proof()
        return None if proof is None else _Found(own, proof)

    def _check_outside(
        self, whole: OfWholeSequence, call: Call, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Raises where code for a piece uses another tensor, made by nothing that is seen."""
        for number, (tensor, makers) in enumerate(zip(tensors, call.makers, strict=True)):
            other = whole.outside.get(number)
            if makers or other is None or other is tensor:
                continue
            if other.shape != tensor.shape or not torch.equal(other, tensor):
                raise self._refused(
                    call.function,
                    f"gets a tensor of shape {tuple(tensor.shape)} that no function of PyTorch has "
                    "made that is seen, and that is another one for the whole sequence",
                )

    def _check_reads(
        self, call: Call, tensors: Sequence[torch.Tensor], whole: OfWholeSequence
    ) -> None:
        """Raises if numbers of a piece become Python's."""
        if whole.results:
            return
        metas = [each.to("meta") for each in tensors]
        args, kwargs = put_together(call.spec, call.leaves, metas)
        try:
            with torch.no_grad():
                call.function(*args, **kwargs)
        except Exception as error:
            raise self._refused(
                call.function,
                "has Python look at the numbers of a tensor of which each rank has a piece: look "
                "at its sum, its mean, or at what the step returns",
            ) from error

    def _refused(
        self,
        function: Any,
        why: str | None,
        tensors: Sequence[torch.Tensor] = (),
        held: Sequence[Held] = (),
    ) -> UnsupportedError:
        pieces = [
            f"{tuple(tensor.shape)} of {tuple(each.whole)}"
            for tensor, each in itertools.islice(zip(tensors, held, strict=True), 4)
        ]
        return refused(function if isinstance(function, str) else _name(function), why, pieces)


def _cuts(held: Sequence[Held], proof: Proof) -> tuple[Layout | None, ...]:
    return tuple(
        None if each.is_piece else layout for each, layout in zip(held, proof.layouts, strict=True)
    )


def _as_key(leaves: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns arguments so that 1, 1.0 and True are told apart, and slices can be looked up."""
    return tuple(
        (slice, each.start, each.stop, each.step) if isinstance(each, slice) else (type(each), each)
        for each in leaves
    )


def _is_hashable(key: object) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _has_backward_code(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def _name(function: Any) -> str:
    if _has_backward_code(function):
        return f"{function.__self__.__name__}.apply"
    try:
        name = resolve_name(function)
    except RuntimeError:  # of functions that PyTorch knows no overrides of
        name = None
    return name or str(getattr(function, "__name__", function))
