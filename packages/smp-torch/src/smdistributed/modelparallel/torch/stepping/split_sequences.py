"""The microbatches of a step whose sequences several ranks share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.common.microbatch import SplitRules
from smdistributed.modelparallel.torch.compat.private.backward import is_without_graph
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensorMode, pytree
from smdistributed.modelparallel.torch.context_parallel.computing import computing
from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup
from smdistributed.modelparallel.torch.context_parallel.looking import leaving_nothing, seeing
from smdistributed.modelparallel.torch.context_parallel.proving import Proofs
from smdistributed.modelparallel.torch.context_parallel.refusals import (
    check_numbers,
    check_used,
    failing_for_pieces,
)
from smdistributed.modelparallel.torch.context_parallel.run import PieceRun, Ways
from smdistributed.modelparallel.torch.context_parallel.way import Held, Way, WholeRun
from smdistributed.modelparallel.torch.execute.bodies import Call
from smdistributed.modelparallel.torch.model.distributed import models_of
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.stepping.sequences import (
    SequenceDims,
    agreed_seed,
    arguments_of,
)
from smdistributed.modelparallel.torch.tensors.nested import map_tensors


class SplitSequences:
    """Runs the body of a step function for the own pieces of its sequences.

    Args:
        runtime: the state of the library in this process.
        group: the ranks that share them.
        function: the user's function.
        rules: which of its arguments are split.
        dims: where they have their sequences.

    Attributes:
        is_looking: whether the body runs for the whole, to see what it calls.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        group: ContextGroup,
        function: Callable[..., Any],
        rules: SplitRules,
        dims: Mapping[str, int | None],
    ) -> None:
        self._runtime = runtime
        self._group = group
        self._function = function
        self._rules = rules
        self._dims = SequenceDims(rules, dims, group.size)
        self._ways = Ways(Proofs(group))
        self._run: PieceRun | None = None
        self.is_looking = False

    def agree(self, seed: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Returns the seed of the step, the same on all ranks. Collective: CP_GROUP.

        Raises:
            SMPError: they were called with different batches.
        """
        return agreed_seed(self._group, seed, arguments_of(self._rules, args, kwargs))

    def run(self, call: Call, body: Callable[[Call], Any]) -> Any:
        """Returns what the body gives for a microbatch, whole."""
        args, kwargs = call
        arguments, length = self._dims.of(args, kwargs)
        given = [(tensor, Held(tensor.shape, layout)) for tensor, layout in arguments]
        most = max(tensor.numel() for tensor, layout in arguments if layout is not None)
        run = PieceRun(self._ways, given, length, most, lambda: self._look(call))
        self._run = run
        try:
            with self._failing_clearly(run), computing(run):
                result = body(call)
            with run.aside():
                check_used(has_pieces=run.has_pieces)
                if run.looked is not None:
                    check_numbers(_numbers_in(result), run.looked.given, run.lengths())
                return map_tensors(result, run.whole)
        finally:
            self._run = None

    def differentiating(self, tensors: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, a backward pass of the microbatch runs.

        Raises:
            UnsupportedError: ``tensors`` are pieces.
        """
        if self._run is None:
            return contextlib.nullcontext()
        self._run.check_whole(tensors, "model.backward")
        return self._run.aside()

    @contextlib.contextmanager
    def _failing_clearly(self, run: PieceRun) -> Iterator[None]:
        """Inside, code is refused that fails for a piece, where it just ran for the whole.

        Raises:
            UnsupportedError: it has failed.
        """
        try:
            yield
        except (SMPError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if run.looked is None:
                raise
            raise failing_for_pieces(error, run.own_length, run.length) from error

    def _look(self, call: Call) -> Way:
        """Runs the body for the whole, without gradients, and leaves nothing of it behind."""
        try:
            return self._tried(call, self._runtime.fake_mode)
        except Exception:  # of code that wants to know numbers, or of any code: then it comes again
            return self._tried(call, None)

    def _tried(self, call: Call, fake_mode: FakeTensorMode | None) -> Way:
        """Runs it; of what parameters meet there are no numbers if there is a mode of fakes."""
        models = models_of(self._runtime)
        copies: dict[int, torch.Tensor] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, torch.nn.Parameter):
                return tensor
            return copies.setdefault(id(tensor), tensor.detach().clone())

        args, kwargs = map_tensors(call, copied)
        run = WholeRun(list(copies.values()), fake_mode)
        modules = [each for model in models for each in model.modules()]
        self.is_looking = True
        try:
            with (
                leaving_nothing(modules, [self._function], self._runtime.random.apart),
                seeing(run),
            ):
                run.way.given = _numbers_in(self._function(*args, **kwargs))
        except RuntimeError as error:
            if not is_without_graph(error):
                raise
            raise UnsupportedError(
                "a step function computes gradients by itself, which with context_parallel_degree "
                "are those of a piece of the sequence: give the loss to model.backward."
            ) from error
        finally:
            self.is_looking = False
        return run.way


def _numbers_in(result: Any) -> tuple[int, ...]:
    """Returns the whole numbers in what a step function gives."""
    return tuple(each for each in pytree.tree_leaves(result) if type(each) is int)
