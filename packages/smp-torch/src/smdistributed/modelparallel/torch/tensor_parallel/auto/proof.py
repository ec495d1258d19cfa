"""Whether slices of a module compute what the whole module does: tried, with random numbers.

The output of the whole must be the sum of those of the slices, their mean, or these side by side;
or, where they have summed what code goes on with, that of each. Then autograd gives the right
gradients too: those of weights and inputs are the sums over the ranks. Code may change them, so
those of the input are compared, and those of parameters that every rank has whole.

It is computed in double precision, so that a wrong split stands out of rounding, whatever processor
adds up; what rounding moves is measured, see ``rounding``. Code that has single precision written
into it is tried in that.

What is tried first are a few examples with small numbers; then more examples and larger numbers, of
which code may make something else. What the whole cannot compute says nothing then, nor does what
is nothing but rounding, as the gradient behind a saturated softmax.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.state import reads as state_reads
from smdistributed.modelparallel.torch.tensor_parallel.auto.adapting import Adapting
from smdistributed.modelparallel.torch.tensor_parallel.auto.calls import (
    Call,
    TensorForm,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.kept import (
    activation_in,
    tensors_kept_in,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.meetings import (
    Meetings,
    examples_of,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.outputs import (
    SAME,
    RefutedError,
    kind_of,
    kinds_of,
    split_dim,
    weights_of,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.plan import Plan
from smdistributed.modelparallel.torch.tensor_parallel.auto.proven import Proof
from smdistributed.modelparallel.torch.tensor_parallel.auto.shrinking import shrunk
from smdistributed.modelparallel.torch.tensor_parallel.auto.statistics import (
    AddUp,
    Reduction,
    Statistics,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.template import Template
from smdistributed.modelparallel.torch.tensor_parallel.auto.trial_gradients import (
    gradients_of,
    is_differentiated,
    sources_of,
)
from smdistributed.modelparallel.torch.tensor_parallel.auto.trial_slices import (
    tried,
    tried_in_slices,
)
from smdistributed.modelparallel.torch.trial.alone import alone
from smdistributed.modelparallel.torch.trial.rounding import (
    Rounding,
    Tolerance,
)

#: How large the other numbers are: where functions are far from linear, and where most saturate.
_LARGER = (8.0, 100.0)
#: How often what rounding moves is measured.
_MEASURED = 2
#: Of the numbers that are tried, until some tell something.
_SEEDS = 1, 2, 3


class _NoTrialError(RefutedError):
    """The whole does not compute what is tried; says why."""


class _VagueError(RefutedError):
    """Rounding moves what is tried so far that it tells nothing; other numbers may tell more."""


def prove(
    template: Template,
    plan: Plan,
    size: int,
    call: Call,
    forms: Sequence[TensorForm],
    *,
    grad_enabled: bool,
) -> Proof:
    """Proves that slices give the result of the whole, for one form of a call.

    Args:
        template: of the module.
        plan: how it is split.
        size: over how many ranks.
        call: its structure.
        forms: of its tensors.
        grad_enabled: whether it is called with gradients.

    Raises:
        RefutedError: they do not.
    """
    modules = list(template.module.modules())
    few, many = alone(lambda: shrunk(template, call, forms), modules)

    def made(dtype: torch.dtype, seed: int, *, folds: bool = False) -> _Trial:
        draws = torch.Generator().manual_seed(seed)
        return _Trial(template.made(draws, dtype), plan, size, call, dtype, draws, folds)

    def drawn(trial: _Trial) -> Proof:
        with torch.set_grad_enabled(grad_enabled):
            proof = trial.run(few)
            if many is not None:
                # Many numbers take their time: their results alone are compared.
                proof = trial.run_again(proof, many, "with more examples", has_gradients=False)
            for factor in _LARGER:
                with trial.larger(factor):
                    proof = trial.run_again(proof, few, "with large numbers", factor)
            return proof

    def folded_or_not(dtype: torch.dtype, seed: int) -> Proof:
        trial = made(dtype, seed)
        try:
            return drawn(trial)
        except (_NoTrialError, _VagueError):
            raise
        except RefutedError as error:
            if any(each.may_fold for each in trial.met):
                with contextlib.suppress(RefutedError):
                    return drawn(made(dtype, seed, folds=True))
            raise error

    def proven(dtype: torch.dtype) -> Proof:
        for seed in _SEEDS[:-1]:
            with contextlib.suppress(_VagueError):
                return folded_or_not(dtype, seed)
        return folded_or_not(dtype, _SEEDS[-1])

    try:
        return alone(functools.partial(proven, torch.float64), modules)
    except _NoTrialError as error:
        try:
            return alone(functools.partial(proven, torch.float32), modules)
        except _NoTrialError:
            raise error from None
    except UnsupportedError as error:
        raise RefutedError(f"its code changes what cannot be put back: {error}") from error


@dataclass
class _Trial:
    """A module that is tried whole and in slices.

    Attributes:
        whole: the module.
        plan: how it is split.
        size: over how many ranks.
        call: its structure.
        dtype: of what is drawn.
        draws: gives it random numbers.
        folds: what may be examples and heads in one dim is taken for that.
        met: what was found of meetings.
    """

    whole: nn.Module
    plan: Plan
    size: int
    call: Call
    dtype: torch.dtype
    draws: torch.Generator
    folds: bool = False
    met: list[Meetings] = field(default_factory=list)

    @contextlib.contextmanager
    def larger(self, factor: float) -> Iterator[None]:
        """Inside, weights of norms are larger, as these undo what is large before them."""
        vectors = [each for each in self.whole.parameters() if each.dim() == 1]
        before = [each.detach().clone() for each in vectors]
        with torch.no_grad():
            for each in vectors:
                each.mul_(factor)
        yield
        with torch.no_grad():
            for each, value in zip(vectors, before, strict=True):
                each.copy_(value)

    def run_again(
        self,
        proof: Proof,
        forms: Sequence[TensorForm],
        how: str,
        factor: float = 1.0,
        *,
        has_gradients: bool = True,
    ) -> Proof:
        """Tries another call; returns a proof of both.

        Raises:
            RefutedError: slices do not compute what the whole does, or otherwise than before.
        """
        try:
            again = self.run(forms, factor, proof, has_gradients=has_gradients)
        except _NoTrialError:
            return proof
        except RefutedError as error:
            raise RefutedError(f"{how}, {error}") from error
        if again.adaptions != proof.adaptions:
            raise RefutedError(f"{how} it is split in another way")
        return replace(proof, read=proof.read | again.read)

    def run(
        self,
        forms: Sequence[TensorForm],
        factor: float = 1.0,
        known: Proof | None = None,
        *,
        has_gradients: bool = True,
    ) -> Proof:
        """Tries a call.

        Args:
            forms: of its tensors.
            factor: how large its numbers are.
            known: what was seen before. Without it rounding must leave the results their meaning.
            has_gradients: whether gradients are compared, too.

        Raises:
            RefutedError: slices do not compute what the whole does.
        """
        whole = self.whole
        arguments = self.call.sample(forms, self.draws, self.dtype, factor)
        sources = sources_of(whole, self.plan, arguments) if has_gradients else []
        buffers = _versions(whole)
        given = [version_of(each) for each in Call(arguments).tensors]
        with state_reads.noted(whole) as read:
            try:
                expected, drawn, reductions = tried(whole, arguments)
            except RefutedError as error:
                raise _NoTrialError(str(error)) from error
        if given != [version_of(each) for each in Call(arguments).tensors]:
            raise RefutedError("it changes its arguments")
        if buffers != _versions(whole):
            raise RefutedError("it changes its buffers")
        kept = tensors_kept_in(whole)
        _check_kept(activation_in(kept))
        kept = {place: each.clone() for place, each in kept.items()}
        if not all(each.isfinite().all() for each in expected.tensors):
            raise _NoTrialError("it gives no finite numbers on random input")
        weights = self._weights_like(expected.tensors)
        wanted = [*expected.tensors, *gradients_of(sources, expected.tensors, weights)]
        if known is not None and len(known.outputs) != len(expected.tensors):
            raise RefutedError("it returns more tensors or fewer")
        number = len(wanted)
        wanted += kept.values()
        tolerance = Tolerance(wanted, self._moved(arguments, sources, weights, kept))
        # Gradients of parameters, of which some change nothing.
        free = range(len(expected.tensors) + is_differentiated(arguments), number)
        told = (place for place in range(len(wanted)) if place not in free)
        if known is None and any(map(tolerance.is_vague, told)):
            raise _VagueError("rounding alone changes its numbers so much that nothing is proven")
        results, shapes, adaptings = [], [], []
        adapting_of = functools.partial(self._adapting, arguments, known, reductions)
        for found, dropped, adapting, kept_of_slice in tried_in_slices(
            whole, self.plan, self.size, arguments, read, adapting_of
        ):
            for place, own in enumerate(kept, number):
                if own not in kept_of_slice or not tolerance.holds(place, kept_of_slice[own]):
                    _check_kept(own)
            results.append(found)
            shapes.append(dropped)
            adaptings.append(adapting.found)
        if any(found.structure != expected.structure for found in results):
            raise RefutedError("its slices return something else")
        outputs = tuple(
            kind_of(
                [found.tensors[place] for found in results],
                want,
                functools.partial(tolerance.holds, place),
                None if known is None else known.outputs[place],
                kinds_of(self.plan),
            )
            for place, want in enumerate(expected.tensors)
        )
        if all(kind == SAME for kind in outputs):
            raise RefutedError("its result does not come from what is split")
        if any(len(each) != len(drawn) for each in shapes):
            raise RefutedError("its slices draw at other places")
        if any(each != adaptings[0] for each in adaptings):
            raise RefutedError("its slices meet what is whole in different ways")
        every = [each for found in results for each in found.tensors]
        ranks = range(self.size)
        theirs = [each for n in ranks for each in weights_of(n, self.size, outputs, weights)]
        for place, each in enumerate(gradients_of(sources, every, theirs), len(outputs)):
            is_told = place not in free or not tolerance.is_vague(place)
            if is_told and not tolerance.holds(place, each):
                raise RefutedError("code or a hook in it changes gradients")
        split = [split_dim(drawn[n], [each[n] for each in shapes]) for n in range(len(drawn))]
        return Proof(outputs, tuple(split), *adaptings[0], frozenset(read))

    def _weights_like(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns random gradients of results."""
        return [
            torch.randn(each.shape, generator=self.draws, dtype=torch.float64).to(each.dtype)
            if each.requires_grad
            else torch.zeros_like(each)
            for each in results
        ]

    def _moved(
        self,
        arguments: Any,
        sources: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        kept: Mapping[str, torch.Tensor],
    ) -> Iterator[list[torch.Tensor]]:
        """Yields results and gradients of the whole, and what it keeps, computed with errors."""
        drawn = [*self.whole.parameters(), *Call(arguments).tensors, *weights]
        for seed in range(_MEASURED):
            with Rounding(drawn, seed):
                results = tried(self.whole, arguments)[0].tensors
                if [each.shape for each in results] != [each.shape for each in weights]:
                    raise RefutedError("rounding alone changes what it returns")
                gradients = gradients_of(sources, results, weights)
            now = tensors_kept_in(self.whole)
            yield [*results, *gradients, *(now.get(place, each) for place, each in kept.items())]

    def _adapting(
        self,
        arguments: Any,
        known: Proof | None,
        of_whole: Sequence[Reduction],
        rank: int,
        add_up: AddUp,
    ) -> Adapting:
        """Returns what adapts the calls of one rank: as is known, or as is to be found."""
        examples = examples_of(Call(arguments).tensors)
        if known is not None:
            return known.adapting(self.size, rank, examples, add_up)
        meetings = Meetings(self.size, rank, examples, folds=self.folds)
        self.met.append(meetings)
        return Adapting(meetings, Statistics(self.size, rank, add_up, of_whole))


def _check_kept(place: str | None) -> None:
    if place is not None:
        raise RefutedError(f"it keeps an activation, {place}, of which a rank would have a slice")


def _versions(module: nn.Module) -> list[int]:
    return [version_of(each) for each in module.buffers()]
