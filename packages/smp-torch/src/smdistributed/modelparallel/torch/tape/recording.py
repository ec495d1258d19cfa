"""Recording the tape of a pass while it is computed as it is."""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import noop_context_fn

from smdistributed.modelparallel.torch.compat.between import standing_between
from smdistributed.modelparallel.torch.compat.private.backward import (
    number_of_node,
    saved_tensors_hooks,
)
from smdistributed.modelparallel.torch.compat.private.checkpointing import (
    Around,
    Reentrant,
    checkpointing_replaced,
    stops_early,
)
from smdistributed.modelparallel.torch.compat.private.compiled import (
    backend_of,
    call_as_written,
    compiled_call,
    uses_cuda_graphs,
)
from smdistributed.modelparallel.torch.compat.private.modes import (
    FakeTensorMode,
    TorchDispatchMode,
    function_modes_left,
    function_modes_work,
    is_watched_below,
    past_all_modes,
    past_dispatch_modes,
    past_subclass_functions,
    past_transforms,
)
from smdistributed.modelparallel.torch.compat.private.tensors import storage_of, version_of
from smdistributed.modelparallel.torch.tape.origins import OTHERS, Origins
from smdistributed.modelparallel.torch.tape.outside import place_of
from smdistributed.modelparallel.torch.tape.promises import promise
from smdistributed.modelparallel.torch.tape.running import seeds
from smdistributed.modelparallel.torch.tape.settings import Settings
from smdistributed.modelparallel.torch.tape.tape import (
    REFERENCES,
    Call,
    CastsForgotten,
    DrawBegins,
    DrawEnds,
    Earlier,
    Made,
    OnHost,
    Own,
    RegionBegins,
    RegionEnds,
    Tape,
    has_state,
)
from smdistributed.modelparallel.torch.tensor_parallel.slice_guard import (
    GuardedSlice,
    slices_as_they_are,
)
from smdistributed.modelparallel.torch.tensors.memory import MemoryNotes
from smdistributed.modelparallel.torch.tensors.nested import (
    is_plain_value,
    map_tensors,
    opaque_objects,
    placeholders,
    template,
    tensors_in,
)
from smdistributed.modelparallel.torch.tensors.spec import TensorSpec
from smdistributed.modelparallel.torch.trial.turns import is_code_of_others

_SET_DATA = torch.ops.aten.set_data.default
#: What classes have of methods that are no code in C.
_WRITTEN_IN_PYTHON = (types.FunctionType, classmethod, staticmethod, property)
#: Tensors of the host of more elements are too many to compare in each step, or to copy.
_MOST_ON_HOST = 1 << 16


class Recording(TorchFunctionMode):
    """Takes the calls of a pass down, and makes them.

    Args:
        device: where the pass is computed.
        devices: the types of those that autocast may be on for.
        given: the tensors that the pass is given.
        earlier: the recordings of earlier passes of the microbatch.
        recomputed: returns a checkpointed function as it is called again.
        fakes: of what compiled modules are given, while they run as they are written.
        is_as_written: compiled modules do so here.
        is_given_ahead: what the pass is given is there before those that come before it run.
        known_hooks: hooks of saved tensors that are around every pass.

    Attributes:
        tape: what was taken down.
        is_inside: a call is in progress: what that calls is part of it.
    """

    def __init__(
        self,
        device: torch.device,
        devices: tuple[str, ...],
        given: Sequence[torch.Tensor | None],
        earlier: Sequence[Recording],
        recomputed: Callable[[Callable[..., Any]], Callable[..., Any]],
        fakes: FakeTensorMode,
        *,
        is_as_written: bool = False,
        is_given_ahead: bool = False,
        known_hooks: Any = None,
    ) -> None:
        super().__init__()
        self.tape = Tape(num_given=len(given))
        self.is_inside = False
        self._device_type = device.type
        self._devices = devices
        self._earlier = earlier
        self._recomputed = recomputed
        self._fakes = fakes
        self._is_as_written = is_as_written
        #: A compiled module runs.
        self._in_compiled = False
        #: Of a checkpointed call: the number of its first tensor, and torch's own hooks.
        self._region: int | None = None
        self._hooks = known_hooks
        #: By identity: a weak reference, the number, its version and the number of its node.
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], int, int, int]] = {}
        self._draws: list[DrawBegins] = []
        #: Of each draw in progress, what the generators were seeded with for it.
        self._seeds: list[list[int]] = []
        #: The memory of tensors that calls have made.
        self._own_memory = MemoryNotes[None]()
        self._origins = Origins(device.type)
        #: Tensors from outside, and where they were.
        self._places: list[tuple[torch.Tensor, tuple[Any, ...]]] = []
        #: By identity, objects that each pass makes for itself, and what stands for them.
        self._owned: dict[int, tuple[Any, Own]] = {}
        nothing = torch.empty(0, device=device)
        for each in given:
            self._make(nothing if each is None else each)
            if is_given_ahead and each is not None and not each.requires_grad:
                self._origins.note_given(self._numbered([each]))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, calls are taken down."""
        unseen = _Unseen(self)
        seen = (
            standing_between(self, self._note_applied),
            checkpointing_replaced(self._checkpoints_seen),
        )
        with seen[0], seen[1], unseen, self, _code_seen(self):
            yield

    def _checkpoints_seen(self, around: Around, reentrant: Reentrant) -> tuple[Around, Reentrant]:
        def region(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
            generator = around(self._recomputed(function), *args, **kwargs)
            if args[1] is not noop_context_fn:
                self.tape.refuse("a checkpointed call has a context of its own")
            if self._draws or self._region is not None:
                self.tape.refuse("a checkpointed call lies in another one, or in a draw")
            settings = Settings.now(self._devices, self._hooks)
            with self.aside():
                next(generator)
            self.tape.events.append(RegionBegins(stops_early((function, *args)), settings))
            former, self._hooks = self._hooks, saved_tensors_hooks()
            self._region = len(self.tape.specs)
            try:
                yield
            finally:
                self._hooks, self._region = former, None
            self.tape.events.append(RegionEnds())
            with self.aside():
                next(generator, None)

        def refused(*args: Any) -> Any:
            self.tape.refuse("a call is checkpointed with use_reentrant=True")
            return reentrant(*args)

        return region, refused

    def end(self, results: Sequence[torch.Tensor]) -> None:
        """Takes note of what the pass gives."""
        with slices_as_they_are():
            self._end(results)

    def _end(self, results: Sequence[torch.Tensor]) -> None:
        self.tape.results = self._template(tuple(results))
        if self.tape.ahead and self._origins.is_given_written:
            # By another tensor with its memory: for the next pass it would have other answers.
            self.tape.refuse("it writes to what it asks about")
        if self.tape.refusal:
            # Of what came after the reason nothing is known, graphs of autograd say.
            self.tape = Tape(refusal=self.tape.refusal)
            self._places.clear()
            return
        if any(place_of(tensor) != place for tensor, place in self._places):
            self.tape.refuse("it gives a tensor of the model other memory, or hooks")

    def forget(self) -> None:
        """Lets go of what tells tensors apart; no pass of the microbatch follows."""
        self._made.clear()

    # ------------------------------------------------------------------ calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._taken(func, args, kwargs or {}, is_of_torch=True)

    def take(self, function: Any, args: Any, kwargs: Any) -> Any:
        """See ``Between``."""
        return self._taken(function, args, kwargs, is_of_torch=False)

    def _taken(self, function: Any, args: Any, kwargs: Any, *, is_of_torch: bool) -> Any:
        """Makes a call, and takes it down."""
        if not self.tape.refusal and not self.is_inside and is_watched_below(num_own=1):
            self.tape.refuse("a mode or a transform of torch is in it")
        if self.tape.refusal:
            return function(*args, **kwargs)
        with self.aside():
            return self._take(function, args, kwargs, is_of_torch=is_of_torch)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """See ``Between``."""
        self.is_inside = True
        try:
            with function_modes_left(), past_dispatch_modes():
                yield
        finally:
            self.is_inside = False

    def _note_applied(self, function: Any) -> None:
        """Hears of what no compiler has taken in: its backward pass runs Python."""
        if self._in_compiled:
            self._refuse_backward_of(function)

    def _refuse_backward_of(self, function: Any) -> None:
        if (kind := _autograd_function(function)) and is_code_of_others(kind.__module__):
            self.tape.refuse(f"{kind.__qualname__} has a backward pass that is written in Python")

    def when_real(self, tensor: torch.Tensor, do: Callable[[torch.Tensor], None]) -> None:
        """See ``Between``."""
        with self.aside():
            do(tensor)

    def take_compiled(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """See ``Between``."""
        if self._is_as_written:
            return call_as_written(module, args, kwargs)
        if has_state((args, kwargs)):
            self._open_compiled(module)
            if not self.tape.refusal:
                return call_as_written(module, args, kwargs)
        inside = None if self.tape.refusal else self._inside(module, args, kwargs)
        with self.aside():
            if self.tape.refusal:
                return module(*args, **kwargs)
            self._in_compiled = True
            try:
                result = self._take(module, args, kwargs)
            finally:
                self._in_compiled = False
        call = self.tape.events[-1]
        if isinstance(call, Call):
            call.inside = inside
        return result

    def _open_compiled(self, module: nn.Module) -> None:
        """Has the calls of a compiled module be those of the tape, as it is given a cache, say.

        What its Python does to that cannot be tried on fakes, but runs in every pass anyway; what
        lies between its products is compiled from the tape, by the same backend.
        """
        name, backend = type(module).__name__, backend_of(compiled_call(module))
        if self._draws:  # it has one key for all that it draws, which its Python would not have
            self.tape.refuse(f"a compiled {name} is given an object with state, and draws")
        elif self._region is not None:  # computed again it runs compiled, and keeps other tensors
            self.tape.refuse(f"a compiled {name} is given an object with state, in a checkpoint")
        elif uses_cuda_graphs(backend):
            self.tape.refuse(f"a compiled {name} is given an object with state, and has graphs")
        elif self.tape.compiler not in (None, backend):
            self.tape.refuse("compiled modules with caches, say, have several backends")
        self.tape.compiler = backend

    def _inside(self, module: nn.Module, args: Any, kwargs: Any) -> Tape:
        """Returns what the Python of a module calls that runs as compiled code."""
        name = type(module).__name__
        with self.aside(), warnings.catch_warnings():
            # Fakes ask tensors for gradients, whether they are leaves or not.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            fakes = map_tensors((tuple(args), dict(kwargs)), self._fakes.from_tensor)
            recording = Recording(
                torch.device(self._device_type),
                self._devices,
                tensors_in(fakes),
                [],
                self._recomputed,
                self._fakes,
                is_as_written=True,
                known_hooks=self._hooks,
            )
            try:
                with recording.recording():
                    result = call_as_written(module, *fakes)
                recording.end(tensors_in(result))
            except Exception as error:
                self.tape.refuse(f"a compiled {name} cannot run on fakes ({error})")
        self.tape.refusal = self.tape.refusal or recording.tape.refusal
        return recording.tape

    def _take(self, function: Any, args: Any, kwargs: Any, *, is_of_torch: bool = False) -> Any:
        tape = self.tape
        given = tensors_in((args, kwargs))
        settings = Settings.now(self._devices, self._hooks)
        versions = _versions(given)
        templates = self._template((tuple(args), dict(kwargs)))
        if not self._is_as_written:  # of what is compiled the compiler writes the backward pass
            self._refuse_backward_of(function)
        others = opaque_objects((args, kwargs))
        if any(isinstance(each, torch.Generator) for each in others):
            tape.refuse("it draws from a generator of its own")
        is_own = bool(self._draws or others)
        origin = OTHERS if is_own else self._origins.of(self._numbered(given))
        if not is_of_torch:  # it may exchange with ranks that do not make it at that time
            origin = origin._replace(calls=None)
        before = self._random_states()
        if self._draws and self._seeds[-1] != seeds(self._device_type):
            tape.refuse("code seeds the generators in the middle of a draw")
        result = function(*args, **kwargs)
        has_drawn = before != self._random_states()
        made = tensors_in(result)
        is_seen_elsewhere = self._note_memory(given, made)
        written = [
            each
            for each, version, now in zip(given, versions, _versions(given), strict=True)
            if version != now
        ]
        is_of_device = any(each.device.type == self._device_type for each in (*given, *made))
        if not (is_of_device or getattr(function, "is_effect", False)):
            tape.on_host.add(function)
            return result
        name = getattr(function, "__qualname__", type(function).__name__)
        if has_drawn and not self._draws:
            tape.refuse(f"{name} draws random numbers that the library gives no key")
        if settings.inference:
            tape.refuse("it is computed in inference mode")
        if settings.saves_otherwise:
            tape.refuse(f"what {name} keeps for the backward pass goes through hooks")
        if self._region is not None and any(map(self._is_before_region, written)):
            tape.refuse("a checkpointed call writes to a tensor from outside")
        computes = bool(written) or not made or not is_seen_elsewhere
        call = Call(function, templates[0], templates[1], settings, computes, draws=has_drawn)
        changed = set(map(id, written))
        standing = placeholders(templates, (Made, Earlier, OnHost, torch.Tensor))
        call.written = tuple(
            each for each, tensor in zip(standing, given, strict=True) if id(tensor) in changed
        )
        known = {id(each) for each in given}
        for each in made:
            if id(each) not in known:
                self._make(each)
        call.result = template(result, self._reference, lambda obj: self._keep(name, obj))
        call.is_fixed = _is_fixed(call.result)
        # What gives nothing does something, but for attributes.
        is_question = result is not None or name.endswith("__get__")
        own = placeholders((call.args, call.kwargs), (Made, Earlier, Own))
        call.is_asked_again = is_question and not made and next(own, None) is None
        if (
            result is not None
            and not made
            and not _is_answered_without_memory(function, args, kwargs)
        ):
            # Of a number every batch has another one; whether something is so, many have in common.
            is_ahead = origin.calls is not None and not origin.is_constant
            call.is_asked_ahead = is_ahead and type(result) is bool
            call.is_known = origin.is_constant or call.is_asked_ahead
            if not call.is_known:
                tape.refuse(f"{name} asks for the numbers of a tensor, or where it is")
        if call.is_asked_ahead:
            tape.ahead |= {*(origin.calls or ()), len(tape.events)}
        tensors = self._numbered(given), self._numbered(made)
        self._origins.note_call(len(tape.events), origin, *tensors, written)
        if origin.is_constant:
            call.numbers = self._numbers(call, result)
        tape.events.append(call)
        return result

    def _numbers(self, call: Call, result: Any) -> torch.Tensor | None:
        """Returns what a call has made of numbers of the host."""
        is_tensor = type(result) is torch.Tensor and not result.requires_grad
        if not is_tensor or next(placeholders((call.args, call.kwargs), Made), None) is not None:
            return None
        is_of_device = result.device.type == self._device_type
        is_small = is_of_device and result.numel() <= _MOST_ON_HOST
        return result.clone() if is_small and not self._is_as_written else None

    def _is_before_region(self, tensor: torch.Tensor) -> bool:
        found = self._made.get(id(tensor))
        return found is None or self._region is None or found[1] < self._region

    def _keep(self, name: str, obj: Any) -> Any:
        if obj is not NotImplemented and not is_plain_value(obj):
            self.tape.refuse(f"{name} gives an object of class {type(obj).__qualname__}")
        return obj

    # ------------------------------------------------------------------ tensors

    def _numbered(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int | None, torch.Tensor]]:
        found = (self._made.get(id(each)) for each in tensors)
        return [
            (None if made is None else made[1], each)
            for made, each in zip(found, tensors, strict=True)
        ]

    def _random_states(self) -> list[bytes]:
        with past_all_modes(), past_transforms():
            generators = [torch.default_generator]
            if self._device_type == "cuda":
                generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
            return [each.get_state().numpy().tobytes() for each in generators]

    def _note_memory(self, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
        """Takes note of memory that a call has made; returns whether it has made none."""
        with past_subclass_functions():
            known = {storage_of(each) for each in given if each.layout is torch.strided}
            new = [
                each
                for each in made
                if each.layout is not torch.strided or storage_of(each) not in known
            ]
            for each in new:
                if each.layout is torch.strided:
                    self._own_memory[each] = None
        return not new

    def _make(self, tensor: torch.Tensor) -> None:
        number, key = len(self.tape.specs), id(tensor)
        self.tape.specs.append(TensorSpec.of(tensor))
        made = self._made
        forget = weakref.ref(tensor, lambda dead: made.pop(key, None))
        made[key] = forget, number, version_of(tensor), self._node_of(tensor)

    def _node_of(self, tensor: torch.Tensor) -> int:
        try:
            return number_of_node(tensor)
        except RuntimeError:  # one of several views, of which another was written to
            self.tape.refuse("it writes to one of several views that a call has given")
            return -1

    def _template(self, structure: Any) -> Any:
        return template(structure, self._reference, self._object)

    def _object(self, obj: Any) -> Any:
        if not getattr(type(obj), "lives_for_a_pass", False):
            return obj
        own = Own(type(obj), len(self._owned))
        return self._owned.setdefault(id(obj), (obj, own))[1]

    def _reference(self, tensor: torch.Tensor) -> Any:
        """Returns what stands for a tensor."""
        found = self._made.get(id(tensor))
        if found is not None:
            reference, number, version, node = found
            # Writing in place, as calls of the tape do, gives it and its views other nodes.
            if version != version_of(tensor):
                now = version_of(tensor), self._node_of(tensor)
                self._made[id(tensor)] = reference, number, *now
            elif node != self._node_of(tensor):
                self.tape.refuse("autograd was told of a tensor past the functions of torch")
            return Made(number)
        for each in self._earlier:
            if id(tensor) in each._made:
                number = each._made[id(tensor)][1]
                each.tape.kept.add(number)
                return Earlier(each.tape, number)
        if tensor.device.type != self._device_type:
            if tensor.numel() > _MOST_ON_HOST or tensor.requires_grad:
                self.tape.refuse("it computes with a tensor that is not on the device")
            return OnHost(tensor)
        if isinstance(tensor, GuardedSlice):
            return tensor  # no kernel reads it now: what it is asked for is asked again
        with past_subclass_functions():
            has_graph = tensor.grad_fn is not None
            is_own = tensor.layout is torch.strided and tensor in self._own_memory
        if has_graph:
            self.tape.refuse("it computes with a tensor that has a graph of its own")
        if is_own:
            self.tape.refuse("it makes a tensor of another one past the functions of torch")
        if id(tensor) not in self.tape.outside:
            self.tape.outside[id(tensor)] = tensor
            self._places.append((tensor, place_of(tensor)))
        return tensor

    # ------------------------------------------------------------------ random numbers

    @contextlib.contextmanager
    def drawing(
        self,
        key: tuple[str, int, int],
        lane: int,
        seeded: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> Iterator[None]:
        """Stands around a draw: takes its key down."""
        if self.is_inside:
            with seeded():
                yield
            return
        begins = DrawBegins(key, lane)
        self.tape.events.append(begins)
        self._draws.append(begins)
        first = len(self.tape.events)
        with seeded():
            self._seeds.append(seeds(self._device_type))
            before = _state_on_host()
            yield
            calls = itertools.islice(self.tape.events, first, None)
            is_own = self._device_type == "cpu" and any(isinstance(each, Call) for each in calls)
            begins.on_host = not is_own and before != _state_on_host()
        self._draws.pop()
        self._seeds.pop()
        self.tape.events.append(DrawEnds())

    def has_drawn(self, has: Callable[[], bool]) -> bool:
        """Tells whether numbers were drawn in the innermost draw, and takes it down."""
        drew = has()
        if not self.is_inside:
            self._draws[-1].drew = drew
        return drew

    def forget_casts(self) -> None:
        """Takes note that autocast lets go of the weights that it has cast."""
        if not self.is_inside:
            self.tape.events.append(CastsForgotten())


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    with past_subclass_functions():
        return list(map(version_of, tensors))


def _is_answered_without_memory(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a question is about how tensors look: what is in them, and where, is no constant."""

    def without(tensor: torch.Tensor) -> torch.Tensor:
        # A guarded slice has no memory itself, and has been asked.
        return tensor if isinstance(tensor, GuardedSlice) else promise(TensorSpec.of(tensor))

    args, kwargs = map_tensors((tuple(args), dict(kwargs)), without)
    try:
        function(*args, **kwargs)
    except Exception as error:
        # Its frames would keep what they, and those that called them, have of graphs.
        error.__traceback__ = None
        return False
    return True


def _autograd_function(function: Any) -> type | None:
    """Returns the autograd function that is applied; None if none is."""
    kind = getattr(function, "__self__", None)
    is_one = isinstance(kind, type) and issubclass(kind, torch.autograd.Function)
    return kind if is_one else None


def _state_on_host() -> bytes:
    with past_all_modes(), past_transforms():
        return torch.default_generator.get_state().numpy().tobytes()


def _is_fixed(result: Any) -> bool:
    """Whether nobody can change a result, of which this is the template."""
    if type(result) is tuple:
        return all(map(_is_fixed, result))
    return isinstance(result, (*REFERENCES, torch.Tensor)) or is_plain_value(result)


class _Unseen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices operations that no function of torch was called for."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See ``TorchDispatchMode``: where a pass is not taken down, what is compiled runs so."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The library, past all modes, gives parameters other memory, or other classes.
        is_told_of = function_modes_work() or not (func.is_view or func is _SET_DATA)
        if is_told_of and not self._recording.is_inside:
            self._recording.tape.refuse(f"{func} is called past the functions of torch")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _code_seen(recording: Recording) -> Iterator[None]:
    """Notices code that is neither Python nor torch's: it may read and write memory by itself."""
    before = sys.getprofile()

    def look(frame: types.FrameType, event: str, called: Any) -> None:
        if event != "c_call" or recording.is_inside:
            return
        if called is torch.clear_autocast_cache:
            recording.forget_casts()
            return
        owner = _owner_of(called)
        if is_code_of_others(owner):
            recording.tape.refuse(f"{owner}.{called.__name__} is code of an extension")

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


def _owner_of(called: Any) -> str:
    """Returns the name of the Python module that a function written in C is from."""
    own = getattr(called, "__module__", None)
    if isinstance(own, str):
        return own
    # A class written in Python may have methods of one that is not, also such as it overrides.
    name = called.__name__
    has_it = (each for each in type(called.__self__).__mro__ if name in vars(each))
    own = (each for each in has_it if not isinstance(vars(each)[name], _WRITTEN_IN_PYTHON))
    return next((each.__module__ for each in own), object.__module__)
