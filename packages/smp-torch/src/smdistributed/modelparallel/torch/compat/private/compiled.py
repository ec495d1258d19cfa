"""Modules that PyTorch has compiled, beyond its public API."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._guards import CompileContext, TracingContext

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Has a compiler leave a frame alone, and decide anew of what it calls.
_ITS_FRAME_ALONE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
_tracing_context: Callable[[], Any] = TracingContext.try_get
_compiled_frame: Callable[[], Any] = CompileContext.current_compile_id


def _wrapper_class() -> Any:
    """Returns the class of what ``torch.compile(module)`` gives, if anything has been compiled."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # seconds to import
    return () if compiler is None else compiler.OptimizedModule


#: How the names of the files begin that such code says it is from.
_MADE_BY_TORCH = ("<eval_with_key>", *torch.__path__)


def is_made_by_torch(code: CodeType) -> bool:
    """Whether torch has made code, as that of compiled functions, which may be of no module."""
    return code.co_filename.startswith(_MADE_BY_TORCH)


def written(module: nn.Module) -> nn.Module:
    """Returns the module that the wrapper of a compiled one was made of; any other itself."""
    return module._orig_mod if isinstance(module, _wrapper_class()) else module


def compiled_call(module: nn.Module) -> Any:
    """Returns what tells how a module was compiled; None if it was not."""
    if isinstance(module, _wrapper_class()):
        return module.dynamo_ctx
    call = vars(module).get("_compiled_call_impl")
    while isinstance(call, AroundCompiled):
        call = call.call
    # With ``disable=True`` it is the module's own.
    return call if isinstance(call, FunctionType) else None


def as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that a compiled one was made of; any other as it is."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def compile_like(call: Any, module: nn.Module) -> Callable[..., Any]:
    """Compiles the calls of a module as another one was compiled; returns the new call.

    Args:
        call: of the other one, by ``compiled_call``.
        module: to compile.
    """
    context = _context_of(call)

    # Of a module of torch's own, the compiler takes only what another function calls.
    def call_module(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    call_module.__code__ = _code_for(id(type(module)), call_module.__code__)
    compiled: Callable[..., Any] = context(call_module)
    module._compiled_call_impl = compiled
    return compiled


def _context_of(call: Any) -> Any:
    """Returns the object of the compiler that a call of ``compiled_call`` was made by."""
    if not isinstance(call, FunctionType):
        return call
    cells = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True))
    return cells["self"].cell_contents


@functools.cache
def _code_for(kind: int, code: CodeType) -> CodeType:
    """Returns a copy for each class of modules: how often one code is compiled is limited."""
    return code.replace()


def forget_compiled(module: nn.Module) -> None:
    """Runs a module as it is written again."""
    vars(module).pop("_compiled_call_impl", None)


class AroundCompiled:
    """Does something before and after the compiled calls of a module, outside the compiled code.

    Args:
        module: compiled in place.
        enter: called before, with the module and its positional arguments.
        leave: called after, also when either raises, as hooks are; with the result as well.
    """

    def __init__(
        self, module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
    ) -> None:
        self._module = module
        self._enter = enter
        self._leave = leave
        self.call: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the compiled call."""
        result = None
        try:
            self._enter(self._module, args)
            result = self.call(*args, **kwargs)
            return result
        finally:
            self._leave(self._module, args, result)

    def remove(self) -> None:
        """Leaves the compiled call alone again; others around it stay."""
        outer: Any = self._module._compiled_call_impl
        if outer is self:
            self._module._compiled_call_impl = self.call
        while isinstance(outer, AroundCompiled):
            if outer.call is self:
                outer.call = self.call
            outer = outer.call


def around_compiled(
    module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
) -> list[Any]:
    """Does something before and after the calls of a compiled module, outside the compiled code.

    Args:
        module: compiled in place, or the wrapper of a compiled one.
        enter: called before, with the module and its positional arguments.
        leave: called after, also when either raises; with the result as well.

    Returns:
        handles, whose ``remove`` ends that.
    """
    if is_compiled_in_place(module):
        return [AroundCompiled(module, enter, leave)]
    return hooked(module, enter, leave)


def hooked(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> list[Any]:
    """Does the same by hooks of the module, which in one compiled in place are compiled too."""
    return [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    ]


def is_compiler_loaded() -> bool:
    """Whether anybody can have compiled anything: its import takes seconds."""
    return "torch._dynamo" in sys.modules


def never_compiled(function: _Function) -> _Function:
    """Returns a function that a compiler leaves alone where code that it compiles calls it.

    Of a module of torch's own it skips the frames, and would take the first one of somebody else's
    that runs below: a hook of autograd's, for one.
    """
    if not is_compiler_loaded():
        return function
    left_alone: _Function = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return left_alone


def run_as_written(function: _Function) -> _Function:
    """Returns a function that a compiler leaves alone, with all that it calls, once there is one.

    What talks to other ranks is none of a compiler's business: it would break off at each call
    into torch.distributed, and take streams for a part of the model.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        run = _never_compiled(function) if is_compiler_loaded() else function
        return run(*args, **kwargs)

    # Known to a compiler that comes later: else it would look into this frame, and warn of the
    # cache in it.
    marked: Any = call
    marked._torchdynamo_disable = True
    set_code_exec_strategy(marked.__code__, _ITS_FRAME_ALONE)
    return marked  # type: ignore[no-any-return]


_never_compiled = functools.cache(never_compiled)


def is_being_compiled() -> bool:
    """Whether a compiler, in this thread, asks tensors about themselves; no code runs meanwhile."""
    # Guards of a frame are made when it has been traced.
    return _tracing_context() is not None or _compiled_frame() is not None


def breaks_graph(reason: str) -> Exception:
    """Returns the error by which a compiler leaves what it traces to Python."""
    from torch._dynamo.exc import Unsupported

    return Unsupported(reason)


def frame_left_alone(function: _Function) -> _Function:
    """Returns a function whose own frame a compiler leaves alone; what it calls may be compiled.

    It is the same one each time, once anybody compiles.
    """
    return _left_alone(function) if is_compiler_loaded() else function


@functools.cache
def _left_alone(function: Any) -> Any:
    return torch.compiler.disable(function, recursive=False)  # type: ignore[no-untyped-call]


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether a module was compiled by its own ``compile``; its hooks are compiled with it."""
    return vars(module).get("_compiled_call_impl") is not None


@contextlib.contextmanager
def run_eagerly(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Runs as it is written what is compiled; modules in a wrapper are called as modules."""
    wrappers: list[Any] = [each for each in modules if isinstance(each, _wrapper_class())]
    former = [vars(each)["forward"] for each in wrappers]
    for each in wrappers:
        vars(each)["forward"] = each._orig_mod
    try:
        if is_compiler_loaded():
            with torch.compiler.set_stance("force_eager"):
                yield
        else:
            yield
    finally:
        for each, forward in zip(wrappers, former, strict=True):
            vars(each)["forward"] = forward


@contextlib.contextmanager
def compiled_calls_replaced(
    are_left_alone: Callable[[], bool], stand_in: Callable[[nn.Module, Any, Any], Any]
) -> Iterator[None]:
    """Inside, another function makes the calls of modules that run as compiled code.

    Args:
        are_left_alone: whether calls are made as ever.
        stand_in: gets the module, and the arguments of the call.
    """
    if not is_compiler_loaded():
        yield
        return
    real: Any = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Asked first: whoever notes what is read of modules shall not see this function read.
        if not are_left_alone():
            is_compiled = compiled_call(module) is not None
            return stand_in(module, args, kwargs) if is_compiled else real(module, *args, **kwargs)
        # The compiler would take this function for a part of the model. (It is looked up, since a
        # function that holds itself would hold what it belongs to.)
        this: Any = nn.Module.__call__
        nn.Module.__call__ = real  # type: ignore[method-assign]
        try:
            return real(module, *args, **kwargs)
        finally:
            nn.Module.__call__ = this  # type: ignore[method-assign]

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = real  # type: ignore[method-assign]


def call_as_written(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Calls a module as it is written that runs as compiled code."""
    return written(module)._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def compiler_errors() -> tuple[type[Exception], ...]:
    """Returns what a compiler raises about what it cannot compile; looked up once it has."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return (TorchDynamoException, FailOnRecompileLimitHit)


# Compiling backward passes


def backend_of(call: Any) -> Callable[..., Any]:
    """Returns what compiles the graphs of a module.

    Args:
        call: of the module, by ``compiled_call``.
    """
    from torch._dynamo.eval_frame import innermost_backend

    backend: Callable[..., Any] = innermost_backend(_context_of(call).callback)
    return backend


def has_stance() -> bool:
    """Whether the user has said what compiled code is to do, by ``torch.compiler.set_stance``."""
    from torch._dynamo import eval_frame

    return eval_frame._stance != type(eval_frame._stance)()


class CompiledOtherwise:
    """Calls of a compiled module, compiled by another backend; the rest of how it was stays.

    It is made once: what compiles is looked up by the compiler's guards in every call.

    Args:
        module: by ``compiled_call``, it is compiled.
        backend: the other one.
    """

    def __init__(self, module: nn.Module, backend: Callable[..., Any]) -> None:
        from torch._dynamo import eval_frame

        self._module = module
        self._call = _call_of(module)
        context = _context_of(compiled_call(module))
        other = object.__new__(type(context))
        vars(other).update(vars(context))
        with torch.compiler.set_stance("default", force_backend=backend):
            other.callback = eval_frame._callback_from_stance(context.callback)
        self._other: Callable[..., Any] = other(as_written(self._call))

    @property
    def is_current(self) -> bool:
        """Whether the module is compiled as it was."""
        return _call_of(self._module) is self._call

    def begin(self) -> None:
        """Makes these calls from now on."""
        _give_call(self._module, self._call, self._other)

    def end(self) -> None:
        """Makes the user's calls again, unless the module was compiled anew."""
        _give_call(self._module, self._other, self._call)


def _call_of(module: nn.Module) -> Any:
    """Returns the compiled function of a module that is compiled; what is around it left out."""
    if isinstance(module, _wrapper_class()):
        return vars(module)[_attribute_of(module)]
    call = vars(module).get("_compiled_call_impl")
    while isinstance(call, AroundCompiled):
        call = call.call
    return call


def _attribute_of(wrapper: nn.Module) -> str:
    """Returns where a wrapper has the compiled function; around a lazy module a check is first."""
    return "_forward" if "_forward" in vars(wrapper) else "forward"


def _give_call(module: nn.Module, former: Any, call: Callable[..., Any]) -> None:
    """Puts a compiled function in the place of another one, if that is there."""
    if _call_of(module) is not former:
        return
    outer = vars(module).get("_compiled_call_impl")
    if isinstance(module, _wrapper_class()):
        vars(module)[_attribute_of(module)] = call
    elif isinstance(outer, AroundCompiled):
        while isinstance(outer.call, AroundCompiled):
            outer = outer.call
        outer.call = call
    else:
        vars(module)["_compiled_call_impl"] = call


def uses_cuda_graphs(backend: Any) -> bool:
    """Whether a backend records what it compiles as CUDA graphs."""
    key = "triton.cudagraphs"
    config = getattr(backend, "config", None)
    if isinstance(config, dict) and key in config:
        return bool(config[key])
    inductor = sys.modules.get("torch._inductor.config")
    return inductor is not None and bool(inductor.triton.cudagraphs)


@contextlib.contextmanager
def backward_compilers_replaced(
    replace: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """Has what differentiates a graph compile the backward pass by another compiler.

    Args:
        replace: gives the other, given the one. A compiler takes the graph of a backward pass and
            stand-ins for its inputs, and returns what ``call_compiled`` runs.
    """
    common: Any = importlib.import_module("torch._dynamo.backends.common")
    original: Any = common.aot_module_simplified

    def differentiate(*args: Any, bw_compiler: Any, **options: Any) -> Any:
        # What was compiled for others, and is kept, has another backward pass.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return original(*args, bw_compiler=replace(bw_compiler), **options)

    common.aot_module_simplified = differentiate
    try:
        yield
    finally:
        common.aot_module_simplified = original


def call_compiled(function: Any, args: list[Any]) -> Any:
    """Calls what a compiler returned; it may empty the list, to free what is in it."""
    return function(args) if getattr(function, "_boxed_call", False) else function(*args)


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Marks a function as one that takes its arguments in a list."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def leaves_of_this_pass() -> list[torch.Tensor | None]:
    """Returns the inputs of the function whose backward pass runs now: leaves of autograd, or None.

    One entry for each tensor that the function was given.
    """
    node = torch._C._current_autograd_node()
    return [getattr(each, "variable", None) for each, _ in node.next_functions]
