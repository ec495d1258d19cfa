"""Finding what is done for a call with pieces: what its trials prove, or nothing.

In this order: tokens, which are taken where they are; what pieces of one window give, as they are,
or when those of other windows are moved to it; few numbers, which each rank computes of what is
gathered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from smdistributed.modelparallel.torch.context_parallel.actions import (
    OfAttention,
    OfDropout,
    OfMeanLoss,
    OfPieces,
    OfWhole,
)
from smdistributed.modelparallel.torch.context_parallel.attention import (
    SDPA,
    Places,
    is_along,
    misfit,
)
from smdistributed.modelparallel.torch.context_parallel.calls import (
    Call,
    Form,
    Length,
    put_together,
    shorter_by_turns,
)
from smdistributed.modelparallel.torch.context_parallel.dropout import is_dropout
from smdistributed.modelparallel.torch.context_parallel.gathering import of_few
from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup
from smdistributed.modelparallel.torch.context_parallel.layout import (
    Layout,
    sequence_of,
    shapes_of_pieces,
    shares_of,
)
from smdistributed.modelparallel.torch.context_parallel.losses import is_mean_over_tokens, with_sum
from smdistributed.modelparallel.torch.context_parallel.numbers import Given
from smdistributed.modelparallel.torch.context_parallel.proof import (
    Kind,
    Proof,
    Trial,
    divisors,
)
from smdistributed.modelparallel.torch.context_parallel.refusals import (
    has_backward_code,
    name_of,
    refused,
    refused_call,
)
from smdistributed.modelparallel.torch.context_parallel.short import fits, shortened
from smdistributed.modelparallel.torch.context_parallel.way import (
    Held,
    Made,
    OfWholeSequence,
    Proven,
    call_of,
)
from smdistributed.modelparallel.torch.context_parallel.windows import (
    View,
    layouts_of_tokens,
    of_tokens,
    views,
)
from smdistributed.modelparallel.torch.tensors.functions import GIVING_BACKWARD_CODE


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


class Prover:
    """Finds what is done for calls with sequences of one length.

    Args:
        proofs: of the step function.
        length: of the sequences.
        most: as many numbers of whole sequences as every rank has anyway.
    """

    def __init__(self, proofs: Proofs, length: int, most: int) -> None:
        self._proofs = proofs
        self._group = proofs.group
        self._sequence = sequence_of(0, length, proofs.group.size)
        self._length = length
        self._most = most

    def prove(
        self,
        whole: OfWholeSequence,
        call: Call,
        tensors: Sequence[torch.Tensor],
        held: Sequence[Held],
    ) -> Proven:
        """Returns what is done for a call.

        Args:
            whole: as it was made for the whole.
            call: as it is made for a piece.
            tensors: of this rank.
            held: what it has of each.

        Raises:
            UnsupportedError: nothing is known that is right.
        """
        function = call.function
        if not any(each.is_piece for each in held):
            return self._of_wholes(whole, call, tensors, held)
        if function in GIVING_BACKWARD_CODE:
            raise refused(
                name_of(function),
                "gives code to the backward pass, which would see pieces of gradients",
            )
        # Codes are few numbers, and trials many: of what moves tokens the others are not made.
        moved = of_tokens(whole, call, held, self._length, self._group)
        if moved is not None:
            return moved
        why: str | None = None
        for view in views(held, self._group):
            found = self._of_pieces(whole, call, tensors, view)
            if isinstance(found, Proven):
                return view.before(whole, found)
            why = why or found
        layouts = [each.layout if each.is_piece else None for each in held]
        few = of_few(whole.call, whole.results, layouts, self._group.size, self._most)
        if few is None:
            raise refused_call(function, why, tensors, [each.whole for each in held])
        return Proven(call, few, tuple(map(Held, whole.results)))

    # ------------------------------------------------------------------ kinds of calls

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
            meets = any(isinstance(each, nn.Parameter) for each in tensors)
            own = call if meets else whole.call
            view = View(list(held), [None] * len(held))
            found = self._proof(whole, own, tensors, view, [(each.layout,) for each in held])
            if found is not None:
                is_cut = [each.kind is Kind.CUT for each in found.proof.results]
                if meets and is_cut and all(is_cut):
                    return self._with(whole, call, held, found)
                layouts = [each.layout for each in found.proof.results]
            elif not meets:
                layouts = layouts_of_tokens(whole, held, self._length, self._group)
        results = zip(whole.results, layouts, strict=True)
        return Proven(
            call,
            OfWhole(whole.call.leaves),
            tuple(Held(shape, layout) for shape, layout in results),
        )

    def _of_pieces(
        self,
        whole: OfWholeSequence,
        call: Call,
        tensors: Sequence[torch.Tensor],
        view: View,
    ) -> Proven | str | None:
        """Returns what is done for pieces of one window; else why not, if that is known."""
        function, held = call.function, view.held
        args, kwargs = put_together(call.spec, call.leaves, held)
        if function is SDPA and self._is_cut_along_keys(args, kwargs):
            return self._of_attention(whole, call, args, kwargs)
        args, kwargs = put_together(call.spec, call.leaves, tensors)
        if is_dropout(function, args, kwargs) and held[0].layout is not None:
            action = OfDropout(whole.call.leaves, held[0].whole, held[0].layout)
            return Proven(call, action, (held[0],))
        if is_mean_over_tokens(function, args, kwargs):
            return self._of_mean_loss(whole, call, tensors, view)
        found = self._proof(whole, call, tensors, view, self._layouts(held))
        if found is None:
            return None
        self._check_reads(call, tensors, whole)
        kinds = {each.kind for each in found.proof.results} & {Kind.SUM, Kind.MEAN}
        if kinds and len(found.proof.results) > 1:
            return None
        return self._with(whole, call, held, found, *kinds)

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
        shares = shares_of([each.whole for each in held], proof.layouts, self._group.size)
        share = shares[self._group.rank] if kind is Kind.MEAN and shares is not None else 1.0
        return Proven(call, OfPieces(found.leaves, _cuts(held, proof), kind, share), results)

    def _is_cut_along_keys(self, args: Any, kwargs: Any) -> bool:
        """Whether queries would miss some of the keys."""
        given = dict(zip(("query", "key", "value"), args, strict=False), **kwargs)
        key: Held = given["key"]
        return key.is_piece and is_along(key.layout, len(key.whole) - 2)

    def _of_attention(
        self, whole: OfWholeSequence, call: Call, args: Any, kwargs: Any
    ) -> Proven | str:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, args, strict=False), **kwargs)
        forms = {}
        for name, each in given.items():
            if isinstance(each, Held):
                layout = each.layout if each.is_piece else None
                forms[name] = Form(each.whole, self._own_shape(each), layout)
        why = misfit(forms, given)
        if why is not None:
            return f"cannot be split: {why}"
        query, key = forms["query"], forms["key"]
        assert key.layout is not None
        held = Held(whole.results[0], query.layout, is_piece=query.layout is not None)
        places = Places(query.whole[-2], query.layout, key.whole[-2], key.layout)
        return Proven(call, OfAttention(whole.call.leaves, places), (held,))

    def _own_shape(self, held: Held) -> torch.Size:
        if not held.is_piece or held.layout is None:
            return held.whole
        return shapes_of_pieces(held.whole, held.layout, self._group.size)[self._group.rank]

    def _of_mean_loss(
        self,
        whole: OfWholeSequence,
        call: Call,
        tensors: Sequence[torch.Tensor],
        view: View,
    ) -> Proven | None:
        made = Made()
        args, kwargs = put_together(call.spec, call.leaves, tensors)
        with_own, _ = call_of(call.function, *with_sum(call.function, args, kwargs), made)
        wholes = put_together(whole.call.spec, whole.call.leaves, tensors)
        with_whole, _ = call_of(call.function, *with_sum(call.function, *wholes), made)
        found = self._proof(
            OfWholeSequence(with_whole, whole.results, {}),
            *(with_own, tensors, view, self._layouts(view.held)),
        )
        if found is None or [each.kind for each in found.proof.results] != [Kind.SUM]:
            return None
        return Proven(call, OfMeanLoss(_cuts(view.held, found.proof)), (Held(whole.results[0]),))

    # ------------------------------------------------------------------ proofs

    def _layouts(self, held: Sequence[Held]) -> list[tuple[Layout | None, ...]]:
        """Returns how each tensor may be cut for a call; first what is most likely."""
        pieces = [each for each in held if each.is_piece and each.layout]
        known = [(each.layout.window, each.layout.length_of(each.whole)) for each in pieces]  # type: ignore[union-attr]
        if any(window is None for window, _ in known):
            known.append((self._sequence.window, self._length))
        found: list[tuple[Layout | None, ...]] = []
        for each in held:
            if each.is_piece:
                found.append((each.layout,))
                continue
            others = (
                Layout(dim, outer, window)
                for window, length in dict.fromkeys(known)
                for dim, size in enumerate(each.whole)
                if size and size % length == 0
                for outer in divisors(size // length)
            )
            own = each.layout
            # Labels of the next tokens are cut where the logits are that they meet.
            is_elsewhere = own is not None and any(
                own.window != window and own.length_of(each.whole) == length
                for window, length in known
            )
            first = () if own is None or is_elsewhere else (own,)
            found.append(tuple(dict.fromkeys([*first, None, *others])))
        return found

    def _lengths(self, held: Sequence[Held], layouts: Sequence[Sequence[Any]]) -> list[Length]:
        """Returns how long sequences are among the tensors of a call; first what is most likely."""
        size = self._group.size
        known = [
            (way.window, way.length_of(each.whole))
            for each, ways in zip(held, layouts, strict=True)
            for way in ways
            if way is not None
        ]
        known.append((self._sequence.window, self._length))
        return [
            Length(
                length, tuple(Layout(0, 1, each).size_of(length, at, size) for at in range(size))
            )
            for each, length in dict.fromkeys(known)
            if Layout(0, 1, each).divides(length, size)
        ]

    def _proof(
        self,
        whole: OfWholeSequence,
        call: Call,
        tensors: Sequence[torch.Tensor],
        view: View,
        layouts: Sequence[tuple[Layout | None, ...]],
    ) -> _Found | None:
        """Returns how a call computes with pieces; None if that was not found.

        Code may have taken the length from a tensor that is whole here, so the arguments are also
        tried with that of a piece in its place.
        """
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
            Given(each.whole, tensor, ways, each.is_piece and move is None)
            for each, move, tensor, ways in zip(
                view.held, view.moves, tensors, layouts, strict=True
            )
        ]
        lengths = self._lengths(view.held, layouts)
        found = self._found_short(call, whole, given, lengths)
        for leaves in self._arguments_tried(call.leaves, whole.call.leaves, given, lengths):
            if found is None:
                found = self._found(call, whole.call.leaves, leaves, given)
        if _is_hashable(key):
            known[key] = found
        return found

    def _arguments_tried(
        self,
        own: tuple[Any, ...],
        whole: tuple[Any, ...],
        given: Sequence[Given],
        lengths: Sequence[Length],
    ) -> Iterator[tuple[tuple[Any, ...], ...]]:
        """Yields arguments of each rank.

        Numbers that a rank's Python has taken from pieces of several lengths say nothing of those
        of others, whereas all ranks know those for the whole.
        """
        ways = itertools.chain(shorter_by_turns(whole, lengths))  # with such as a divisor of a mean
        if all(each is None or each.window is None for form in given for each in form.layouts):
            ways = itertools.chain(shorter_by_turns(own, lengths), ways)
        seen = set()
        for leaves in ways:
            key = tuple(map(_as_key, leaves))
            if not _is_hashable(key) or key not in seen:
                yield leaves
            if _is_hashable(key):
                seen.add(key)

    def _found_short(
        self,
        call: Call,
        whole: OfWholeSequence,
        given: Sequence[Given],
        lengths: Sequence[Length],
    ) -> _Found | None:
        """Returns how a call with a long sequence computes with pieces, if a short one shows it."""
        size = self._group.size
        for own in self._arguments_tried(call.leaves, whole.call.leaves, given, lengths):
            candidates = shortened(
                *(call.function, call.spec, whole.call.leaves, own, given, self._length, size)
            )
            for short in candidates:
                found = self._found(call, short.whole, short.own, short.given)
                if found is None:
                    continue
                proof = short.lengthened(found.proof)
                if fits(proof, whole.results, size):
                    return _Found(own[self._group.rank], proof)
        return None

    def _found(
        self,
        call: Call,
        whole: tuple[Any, ...],
        own: tuple[tuple[Any, ...], ...],
        given: Sequence[Given],
    ) -> _Found | None:
        trial = Trial(
            *(call.function, call.spec, whole, own, given, self._group.size),
            backward=has_backward_code(call.function),
        )
        proof = trial.proof()
        return None if proof is None else _Found(own[self._group.rank], proof)

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
            raise refused_call(
                call.function,
                "has Python look at the numbers of a tensor of which each rank has a piece: look "
                "at its sum, its mean, or at what the step returns",
            ) from error


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
