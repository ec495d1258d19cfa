"""Runs of the calls on a tape, as compiled functions.

Between its products a layer makes many small calls: a norm, an activation, a rotation, each of
which reads and writes memory that the next one reads again. Python of the model confirms each call
in every mini-batch, so a graph may compute several as one kernel: when a pass is captured, calls
that follow each other are one compiled function. Layers that are alike share it.

A run has no products, whose kernels the compiler would not write anew and whose gradients may wait,
nothing that draws random numbers or writes to what there is, and no calls of others than PyTorch.
What a gradient is asked of comes to it from outside: within a compiled function there is none.
Nor has it what no gradient comes to: a function with several results gives zeros to what only that
is made of, where autograd gives nothing, and optimizers tell the two apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import resolve_name

from smdistributed.modelparallel.torch.compat.private.backward import engine_as_it_is
from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensorMode,
    TorchDispatchMode,
)
from smdistributed.modelparallel.torch.execute.compiled_runs import CompiledRun, CompiledRuns
from smdistributed.modelparallel.torch.execute.expressions import expression
from smdistributed.modelparallel.torch.record.costs.flops import FlopCounter
from smdistributed.modelparallel.torch.record.costs.work import makes_tensors
from smdistributed.modelparallel.torch.tape.settings import Settings
from smdistributed.modelparallel.torch.tape.tape import Call, Event, Made, Tape, numbers_in
from smdistributed.modelparallel.torch.tensors.functions import (
    ABOUT,
    DIFFERENTIATING,
    GIVING_BACKWARD_CODE,
    READING_GRADIENTS,
)
from smdistributed.modelparallel.torch.tensors.nested import (
    is_plain_value,
    placeholders,
    retemplate,
    text,
)
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec

#: A function that is worth compiling launches so many kernels as it is.
_LEAST_KERNELS = 2
_PLAIN = (torch.Tensor, nn.Parameter)


class TapedRuns:
    """The compiled runs of the tapes of one step function.

    Args:
        compiled: compiles functions; None: only what is compiled without being asked for.
        device: where passes compute.
        devices: the types of those that autocast may be on for.
        fakes: in which calls are looked at.
        are_differentiated: gradients come to what passes give; else backward passes are calls of
            theirs.
    """

    def __init__(
        self,
        compiled: CompiledRuns | None,
        device: torch.device,
        devices: tuple[str, ...],
        fakes: FakeTensorMode,
        *,
        are_differentiated: bool,
    ) -> None:
        self._compiled = compiled
        #: The backends of compiled modules whose calls are on tapes; they have no hashes.
        self._of_modules: list[tuple[Any, CompiledRuns]] = []
        self._device = device
        self._devices = devices
        self._fakes = fakes
        self._are_differentiated = are_differentiated
        #: What calls launch, by how they look.
        self._launched: dict[str, Launched] = {}
        #: Those that have been called, whose code is there.
        self._ready: set[CompiledRun] = set()

    def of(self, tape: Tape) -> Tape:
        """Returns a tape that computes the same with fewer calls; it confirms no Python.

        The same tape if nothing is to be compiled: neither has the script asked for that, nor are
        there calls of a module that was compiled.

        Functions that are new are compiled, which takes seconds, and called on numbers that mean
        nothing: while a graph is captured, no code can be chosen.
        """
        compiled = self._compiled or self._by_compiler_of(tape)
        if compiled is None:
            return tape
        events: list[Event] = []
        gets = _with_gradients(tape, results=self._are_differentiated)
        for part in _parts(tape, self._of_call(tape), gets):
            events += part if isinstance(part, list) else self._as_function(tape, part, compiled)
        return replace(tape, events=events)

    def _by_compiler_of(self, tape: Tape) -> CompiledRuns | None:
        if tape.compiler is None:
            return None
        known = (runs for backend, runs in self._of_modules if backend == tape.compiler)
        if (found := next(known, None)) is None:
            found = CompiledRuns({"backend": tape.compiler})
            self._of_modules.append((tape.compiler, found))
        return found

    def _as_function(self, tape: Tape, run: _Run, compiled: CompiledRuns) -> list[Event]:
        """Returns what a run becomes: the call of a function that does the same."""
        source, names = _source(run)
        given = [(_spec(tape, each), type(each) is nn.Parameter) for each in run.given]
        settings = run.calls[0].settings
        function = compiled.of(source, names, (tuple(given), settings))
        if not isinstance(function, CompiledRun):  # enough were compiled
            return list(run.calls)
        if function not in self._ready:
            self._ready.add(function)
            self._call_once(function, given, settings)
        result = tuple(map(Made, run.results))
        return [Call(function, tuple(run.given), {}, settings, result=result)]

    def _call_once(
        self, function: CompiledRun, given: Sequence[tuple[TensorSpec, bool]], settings: Settings
    ) -> None:
        """Has a function compiled, and its backward pass; neither is one of the script's."""
        with settings.holding(self._devices), engine_as_it_is():
            with torch.no_grad():
                tensors = [
                    _like(each.empty(self._device).zero_(), is_parameter=is_parameter)
                    for each, is_parameter in given
                ]
            results = [each for each in function(*tensors) if each.requires_grad]
            wanted = [each for each in tensors if each.requires_grad]
            if results and wanted:
                gradients = list(map(torch.zeros_like, results))
                torch.autograd.grad(results, wanted, gradients, allow_unused=True)

    # ------------------------------------------------------------------ single calls

    def _of_call(self, tape: Tape) -> Callable[[Call], Launched]:
        def launched(call: Call) -> Launched:
            name = f"{resolve_name(call.function)} {call.settings} " + text(
                (call.args, call.kwargs), lambda each: str(_spec(tape, each))
            )
            if name not in self._launched:
                self._launched[name] = self._look(tape, call)
            return self._launched[name]

        return launched

    def _look(self, tape: Tape, call: Call) -> Launched:
        """Returns what a call launches; what cannot be told is taken for a product."""
        launched = Launched()

        def fake(reference: Any) -> torch.Tensor:
            return _spec(tape, reference).empty(self._device)

        try:
            with self._fakes, call.settings.holding(self._devices):
                with torch.no_grad():
                    args, kwargs = retemplate((call.args, call.kwargs), (Made, torch.Tensor), fake)
                with launched:
                    call.function(*args, **kwargs)
        except Exception:
            launched.products = 1
        return launched


class Launched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a call launches.

    Attributes:
        kernels: operations that compute something.
        products: floating-point operations of products.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = 0
        self.products = 0
        self._counter = FlopCounter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.kernels += makes_tensors(func, out)
        self.products += self._counter.count(func, args, kwargs, out).products
        return out


def _like(tensor: torch.Tensor, *, is_parameter: bool) -> torch.Tensor:
    """Returns a tensor as code is compiled for: parameters are told from others."""
    return nn.Parameter(tensor, requires_grad=tensor.requires_grad) if is_parameter else tensor


# ---------------------------------------------------------------------- where runs are


@dataclass
class _Run:
    """Calls that become one function.

    Attributes:
        calls: in order.
        kernels: that they launch.
        given: what they use of before: tensors of the pass, and such from outside.
        made: the numbers of what they make.
        results: of these, what is used later.
    """

    calls: list[Call] = field(default_factory=list)
    kernels: int = 0
    given: list[Any] = field(default_factory=list)
    made: set[int] = field(default_factory=set)
    results: list[int] = field(default_factory=list)

    def take(self, call: Call, kernels: int) -> None:
        """Adds a call."""
        known = set(map(_key, self.given))
        for each in placeholders((call.args, call.kwargs), (Made, torch.Tensor)):
            is_own = isinstance(each, Made) and each.number in self.made
            if not is_own and _key(each) not in known:
                known.add(_key(each))
                self.given.append(each)
        self.calls.append(call)
        self.kernels += kernels
        self.made.update(numbers_in(call.result))

    def takes(self, call: Call) -> bool:
        """Whether a call computes under the settings of the run."""
        return not self.calls or self.calls[0].settings == call.settings

    def uses(self, call: Call) -> bool:
        """Whether a call is given something that the run makes."""
        return not self.made.isdisjoint(numbers_in((call.args, call.kwargs)))


def _parts(
    tape: Tape, look: Callable[[Call], Launched], gets: set[int]
) -> Iterator[list[Event] | _Run]:
    """Divides the events of a tape into runs, and what lies between them.

    Args:
        tape: the tape.
        look: tells what a call of torch launches.
        gets: the numbers of tensors to which a gradient comes.
    """
    last = tape.last_uses()
    written = _written(tape)
    apart = _with_gradients_of_their_own(tape)
    run, between = _Run(), list[Event]()

    def end(position: int) -> Iterator[list[Event] | _Run]:
        nonlocal run, between
        if run.kernels >= _LEAST_KERNELS:
            run.results = sorted(each for each in run.made if last[each] >= position)
            yield between
            yield run
            between = []
        else:
            between += run.calls
        run = _Run()

    for position, event in enumerate(tape.events):
        if isinstance(event, Call):
            if event.function in ABOUT and not _makes(event):
                continue  # what it has told is in the arguments of other calls
            if _gives_back(event) and not (written(event) or look(event).kernels):
                continue  # as of a conversion to what it is
            is_apart = not apart.isdisjoint(numbers_in(event.result))
            fits = not is_apart and _can_be_in_a_run(event, written)
            if fits and _is_trained(event, tape, gets):
                kernels = _kernels(event, tape, look)
                if kernels is not None:
                    if not run.takes(event):
                        yield from end(position)
                    run.take(event, kernels)
                    continue
            if run.calls and _can_come_before(event, written) and not run.uses(event):
                # As products of the same input, which a layer computes one after the other.
                between.append(event)
                continue
        yield from end(position)
        between.append(event)
    yield from end(len(tape.events))
    yield between


def _kernels(call: Call, tape: Tape, look: Callable[[Call], Launched]) -> int | None:
    """Returns how many kernels a call launches; None if it is left to PyTorch."""
    if _looks_rows_up(call, tape):
        return None
    launched = look(call)
    return None if launched.products else launched.kernels


def _looks_rows_up(call: Call, tape: Tape) -> bool:
    """Whether a call may give the rows of a weight: their gradients are added up by sorting."""
    given = list(placeholders((call.args, call.kwargs), (Made, torch.Tensor)))
    has_weight = any(isinstance(each, torch.Tensor) and each.requires_grad for each in given)
    return has_weight and any(not _spec(tape, each).dtype.is_floating_point for each in given)


def _can_be_in_a_run(call: Call, written: Callable[[Call], bool]) -> bool:
    """Whether a call can be part of a function, as far as it shows."""
    return (
        _can_come_before(call, written)
        and not call.is_known
        and call.numbers is None
        and call.settings.default_dtype is torch.float32
        and any(True for _ in placeholders(call.args, Made))
        and _is_expressed(call.result, (Made,))
        and type(call.result) in (Made, tuple, list)
        and _is_expressed((call.args, call.kwargs), (Made, *_PLAIN))
        and not getattr(call.function, "__name__", "").endswith("__get__")
    )


def _can_come_before(call: Call, written: Callable[[Call], bool]) -> bool:
    """Whether it makes no difference that a call comes earlier than on the tape."""
    made = set(numbers_in(call.result))
    return (
        resolve_name(call.function) is not None
        and call.function not in DIFFERENTIATING
        and not (call.draws or written(call))
        and bool(made)
        and made.isdisjoint(numbers_in((call.args, call.kwargs)))
        and all(
            type(each) in _PLAIN
            for each in placeholders((call.args, call.kwargs, call.result), torch.Tensor)
        )
    )


def _gives_back(call: Call) -> bool:
    """Whether a call has given tensors that it was given, and no others, and has changed none.

    One that gives nothing does something, and is not made again to be looked at.
    """
    is_function = resolve_name(call.function) is not None and _makes(call)
    if not is_function or call.function.__name__.endswith("_"):
        return False
    given = set(map(_key, placeholders(call.args, (Made, torch.Tensor))))
    return given.issuperset(map(_key, placeholders(call.result, (Made, torch.Tensor))))


def _is_trained(call: Call, tape: Tape, gets: set[int]) -> bool:
    """Whether a gradient comes to all that a call makes that could have one."""
    made = numbers_in(call.result)
    return all(each in gets or not tape.specs[each].requires_grad for each in made)


def _with_gradients(tape: Tape, *, results: bool) -> set[int]:
    """Returns the numbers of the tensors to which a gradient comes.

    Args:
        tape: of a pass.
        results: gradients come to what it gives.
    """
    gets = {*tape.kept, *(numbers_in(tape.results) if results else ())}
    if not gets and not any(_differentiates(each) for each in tape.events):
        return set(range(len(tape.specs)))
    for event in reversed(tape.events):
        if not isinstance(event, Call):
            continue
        made = {*numbers_in((event.result, event.written))}
        passes_on = any(each in gets and tape.specs[each].requires_grad for each in made)
        if passes_on or _differentiates(event):
            gets.update(numbers_in((event.args, event.kwargs)))
    return gets


def _differentiates(event: Event) -> bool:
    """Whether something is a backward pass: a call that is given tensors, and makes nothing."""
    return (
        isinstance(event, Call)
        and event.function not in ABOUT
        and not (event.written or _makes(event))
        and any(True for _ in numbers_in((event.args, event.kwargs)))
    )


def _with_gradients_of_their_own(tape: Tape) -> set[int]:
    """Returns the numbers of tensors whose gradients Python asks for, by them or by hooks."""
    calls = [each for each in tape.events if isinstance(each, Call)]
    looking = READING_GRADIENTS | GIVING_BACKWARD_CODE | {torch.Tensor.retain_grad}
    found = {
        number
        for each in calls
        if each.function in looking
        for number in numbers_in((each.args, each.kwargs))
    }
    for each in calls:
        if each.function in DIFFERENTIATING:
            roots = 1 if each.args else 0
            found |= {*numbers_in((each.args[roots:], each.kwargs))}
    return found


def _makes(call: Call) -> bool:
    return next(placeholders(call.result, (Made, torch.Tensor)), None) is not None


def _written(tape: Tape) -> Callable[[Call], bool]:
    """Returns what tells whether a call deals with memory that something writes to."""
    calls = [each for each in tape.events if isinstance(each, Call)]
    home: dict[Any, Any] = {}

    def root(reference: Any) -> Any:
        key = _key(reference)
        while key in home:
            key = home[key]
        return key

    for call in calls:
        if call.computes:
            continue
        # Views have the memory of what they are given.
        for each in placeholders(call.result, (Made, torch.Tensor)):
            for given in placeholders((call.args, call.kwargs), (Made, torch.Tensor)):
                if root(each) != root(given):
                    home[root(each)] = root(given)
    changed = {
        root(each) for call in calls for each in placeholders(call.written, (Made, torch.Tensor))
    }

    def is_written(call: Call) -> bool:
        every = placeholders((call.args, call.kwargs, call.result), (Made, torch.Tensor))
        return any(root(each) in changed for each in every)

    return is_written


def _key(reference: Any) -> Any:
    return reference.number if isinstance(reference, Made) else ("outside", id(reference))


def _spec(tape: Tape, reference: Any) -> TensorSpec:
    is_own = isinstance(reference, Made)
    return tape.specs[reference.number] if is_own else TensorSpec.of(reference)


# ---------------------------------------------------------------------- their code


def _is_expressed(obj: Any, tensors: tuple[type, ...]) -> bool:
    """Whether code can say what stands in a template."""
    if type(obj) in (tuple, list):
        return all(_is_expressed(each, tensors) for each in obj)
    if type(obj) is dict:
        return all(type(key) is str and _is_expressed(obj[key], tensors) for key in obj)
    if type(obj) is slice:
        return all(_is_expressed(each, tensors) for each in (obj.start, obj.stop, obj.step))
    is_plain = is_plain_value(obj) or obj is ...
    return type(obj) in tensors or (is_plain and not isinstance(obj, bytes | complex))


def _source(run: _Run) -> tuple[str, dict[str, Any]]:
    """Returns the code of a run's function, and what it knows."""
    names: dict[str, Any] = {"torch": torch}
    outside = [each for each in run.given if isinstance(each, torch.Tensor)]
    places = {id(each): f"o{place}" for place, each in enumerate(outside)}

    def constant(obj: Any) -> str:
        name = f"c{len(names)}"
        names[name] = obj
        return name

    def name(obj: Any) -> str | None:
        if isinstance(obj, Made):
            return f"v{obj.number}"
        if isinstance(obj, torch.Size):
            return code(tuple(obj))
        return places[id(obj)] if isinstance(obj, torch.Tensor) else None

    def code(obj: Any) -> str:
        return expression(obj, name, constant)

    lines = [f"def run({', '.join(map(code, run.given))}):"]
    for call in run.calls:
        arguments = [*map(code, call.args)]
        arguments += [f"{key}={code(each)}" for key, each in call.kwargs.items()]
        lines.append(f"    result = {constant(call.function)}({', '.join(arguments)})")
        lines += [f"    v{number} = result{path}" for number, path in _paths(call.result)]
    lines.append(f"    return ({''.join(f'v{each}, ' for each in run.results)})")
    return "\n".join(lines), names


def _paths(result: Any, path: str = "") -> Iterator[tuple[int, str]]:
    """Yields the numbers of what a call gives, and where it stands in that."""
    if isinstance(result, Made):
        yield result.number, path
    elif type(result) in (tuple, list):
        for place, each in enumerate(result):
            yield from _paths(each, f"{path}[{place}]")
