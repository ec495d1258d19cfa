"""The microbatches of a step whose sequences several ranks share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from smdistributed.modelparallel.common.errors import SMPError, UnsupportedError
from smdistributed.modelparallel.common.microbatch import SplitRules
from smdistributed.modelparallel.torch.compat.between import standing_between
from smdistributed.modelparallel.torch.compat.private.backward import is_without_graph
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensorMode
from smdistributed.modelparallel.torch.compat.private.tensors import version_of
from smdistributed.modelparallel.torch.compat.transformers_masks import masks_of_whole_sequences
from smdistributed.modelparallel.torch.context_parallel.checkpoints import repeated_for_pieces
from smdistributed.modelparallel.torch.context_parallel.group import ContextGroup
from smdistributed.modelparallel.torch.context_parallel.run import PieceRun, Ways
from smdistributed.modelparallel.torch.context_parallel.way import Way, WholeRun
from smdistributed.modelparallel.torch.execute.bodies import Call
from smdistributed.modelparallel.torch.model.distributed import models_of
from smdistributed.modelparallel.torch.runtime.runtime import TorchRuntime
from smdistributed.modelparallel.torch.state.python_random import python_random_kept
from smdistributed.modelparallel.torch.state.snapshot import Snapshot
from smdistributed.modelparallel.torch.stepping.sequences import (
    SequenceDims,
    arguments_of,
    digest_of,
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
        self._ways = Ways(group)
        self._run: PieceRun | None = None
        self.is_looking = False

    def agree(self, seed: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
        """Returns the seed of the step, the same on all ranks. Collective: CP_GROUP.

        Raises:
            SMPError: they were called with different batches.
        """
        found = arguments_of(self._rules, args, kwargs)
        every = self._group.collectives.compare([seed, digest_of(found)])
        if len({digest for _, digest in every}) > 1:
            raise SMPError(
                "the ranks that share sequences (CP_GROUP) must call a step function with the same "
                f"batch; received different ones on the {self._group.size} of them: choose batches "
                "by smp.dp_rank() and smp.dp_size(), which leave these ranks out, and shuffle with "
                "one seed."
            )
        return every[0][0]

    def run(self, call: Call, body: Callable[[Call], Any]) -> Any:
        """Returns what the body gives for a microbatch, whole."""
        args, kwargs = call
        arguments, length = self._dims.of(args, kwargs)
        run = PieceRun(self._ways, arguments, length, lambda: self._look(call))
        self._run = run
        try:
            with (
                torch.compiler.set_stance("force_eager"),  # compiled code shows no calls
                masks_of_whole_sequences(length // self._group.size, length),
                standing_between(run),
                repeated_for_pieces(run),
                run,
            ):
                result = body(call)
            with run.aside():
                run.check_used()
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
        before = Snapshot([each for model in models for each in model.modules()], [self._function])
        self.is_looking = True
        try:
            with (
                _buffers_kept(models),
                python_random_kept(),
                self._runtime.random.apart(),
                torch.no_grad(),
                standing_between(run),
                run,
            ):
                self._function(*args, **kwargs)
        except RuntimeError as error:
            if not is_without_graph(error):
                raise
            raise UnsupportedError(
                "a step function computes gradients by itself, which with context_parallel_degree "
                "are those of a piece of the sequence: give the loss to model.backward."
            ) from error
        finally:
            self.is_looking = False
            before.note_changes()
            before.put_all_back()
        return run.way


@contextlib.contextmanager
def _buffers_kept(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Puts the numbers of buffers back that are written to inside."""
    buffers = [each for model in models for each in model.buffers()]
    before = [(version_of(each), each.detach().clone()) for each in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, (version, values) in zip(buffers, before, strict=True):
                if version_of(buffer) != version:
                    buffer.copy_(values)
