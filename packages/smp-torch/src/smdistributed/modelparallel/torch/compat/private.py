"""Everything that is used of PyTorch beyond its public API, in one place.

``self_test`` uses each of them once and names what an installed PyTorch does otherwise; the unit
tests run it for each version that the package claims. No other module of the package names what
PyTorch marks as its own by a leading underscore.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import _C, nn
from torch._C._distributed_c10d import (
    _DEFAULT_FIRST_BUCKET_BYTES,
    ProcessGroup,
    Reducer,
    _compute_bucket_assignment_by_size,
)
from torch._C._distributed_c10d import GradBucket as GradBucket
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import (
    TorchFunctionMode,
    _pop_mode_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as native_checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
)
from torch.utils._python_dispatch import (
    _disable_current_modes,
)
from torch.utils.flop_counter import flop_registry as flop_registry

from smdistributed.modelparallel.common.errors import UnsupportedError

#: (function, ...) -> what runs before its call, then after it
Around = Callable[..., Iterator[None]]
#: (function, preserve_rng_state, *args) -> result
Reentrant = Callable[..., Any]

#: What fakes raise where a result depends on data.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)

_innermost_mode: Callable[[], Any] = torch.overrides._get_current_function_mode

#: What ``torch.no_grad`` and the like call.
set_grad_enabled: Callable[..., Any] = torch._C._set_grad_enabled

__all__ = [
    "DATA_DEPENDENT",
    "FakeTensor",
    "FakeTensorMode",
    "GradBucket",
    "OpOverload",
    "TorchDispatchMode",
    "flop_registry",
    "pytree",
]


# Tensors


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a number for the memory of a tensor; tensors that share it have the same."""
    number: int = tensor.untyped_storage()._cdata
    return number


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often a tensor was changed in place."""
    return 0 if tensor.is_inference() else tensor._version


_TENSOR: Any = torch.Tensor
#: What asks for no values of a tensor, besides the public functions.
ABOUT_TENSORS = (
    torch._has_compatible_shallow_copy_type,
    _TENSOR._version.__get__,
    _TENSOR._is_view,
    _TENSOR._backward_hooks.__get__,
    _TENSOR._backward_hooks.__set__,
)


# Modes


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keeps torch from logging the failures of operations on fakes, which it raises as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


@contextlib.contextmanager
def past_recording() -> Iterator[None]:
    """Computes for real in the middle of a run on fakes, and records nothing."""
    with unset_fake_temporarily(), torch._C.DisableTorchFunction():
        yield


def computes_on_fakes() -> bool:
    """Whether operations go to a mode of fakes at present."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def past_all_modes() -> contextlib.AbstractContextManager[Any]:
    """Does something that no mode of torch sees; costs next to nothing where there is none."""
    if not torch._C._len_torch_function_stack() and not torch._C._len_torch_dispatch_stack():
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(_disable_current_modes())
    return stack


def past_transforms() -> contextlib.AbstractContextManager[Any]:
    """Does something that no transform of torch.func sees."""
    context: contextlib.AbstractContextManager[Any] = torch._C._DisableFuncTorch()
    return context


def inside_transform() -> bool:
    """Whether code runs inside a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def past_function_modes() -> contextlib.AbstractContextManager[Any]:
    """Does something that no function mode of torch sees."""
    context: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return context


@contextlib.contextmanager
def without_function_modes(kind: type[TorchFunctionMode]) -> Iterator[None]:
    """Leaves the innermost function modes that are of a kind."""
    with contextlib.ExitStack() as stack:
        while torch._C._len_torch_function_stack() and isinstance(_innermost_mode(), kind):
            stack.enter_context(_pop_mode_temporarily())
        yield


def past_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Does something that no dispatch mode of torch sees."""
    return _disable_current_modes()


def read_backend_switches() -> tuple[bool, ...]:
    """Returns which kinds of attention may be used, cuDNN's flags, and where TF32 may be used.

    ``torch.backends`` reads them by properties and modules that cost microseconds; this runs at
    every call of a recorded step.
    """
    return (
        _C._get_flash_sdp_enabled(),
        _C._get_mem_efficient_sdp_enabled(),
        _C._get_math_sdp_enabled(),
        _C._get_cudnn_sdp_enabled(),
        _C._get_cudnn_enabled(),
        _C._get_cudnn_benchmark(),
        _C._get_cudnn_deterministic(),
        _C._get_cudnn_allow_tf32(),
        _C._get_cublas_allow_tf32(),
    )


def saved_tensors_hooks() -> Any:
    """Returns the innermost hooks of saved tensors that code is inside of; None outside of any."""
    return _C._autograd._top_saved_tensors_default_hooks(True)


def past_subclass_functions() -> contextlib.AbstractContextManager[Any]:
    """Inside, functions of torch take subclasses of tensors as they are."""
    return _C.DisableTorchFunctionSubclass()


def is_in_backward() -> bool:
    """Tells whether a backward pass is running in this thread."""
    return backward_pass_id() != -1


def backward_pass_id() -> int:
    """Returns a number of the backward pass that runs in this thread; -1 if none does."""
    return _C._current_graph_task_id()


def hooks_on_gradient(tensor: torch.Tensor) -> bool:
    """Whether a tensor has hooks that get its gradient."""
    return bool(tensor._backward_hooks)


def hooks_after_accumulation(tensor: torch.Tensor) -> Sequence[Callable[[torch.Tensor], None]]:
    """Returns the hooks that a leaf calls when its gradient has been added up."""
    return tuple((tensor._post_accumulate_grad_hooks or {}).values())


def is_watched() -> bool:
    """Whether operations go to somebody else before they go to autograd: modes, transforms."""
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or inside_transform()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


# Compiled modules


def _wrapper_class() -> Any:
    """Returns the class of what ``torch.compile(module)`` gives, if anything has been compiled."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # seconds to import
    return () if compiler is None else compiler.OptimizedModule


def compiled_call(module: nn.Module) -> Any:
    """Returns what tells how a module was compiled; None if it was not."""
    if isinstance(module, _wrapper_class()):
        return module.dynamo_ctx
    call = vars(module).get("_compiled_call_impl")
    call = call.call if isinstance(call, AroundCompiled) else call
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
    context = call
    if isinstance(call, FunctionType):
        cells = dict(zip(call.__code__.co_freevars, call.__closure__ or (), strict=True))
        context = cells["self"].cell_contents

    # Of a module of torch's own, the compiler takes only what another function calls.
    def call_module(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    call_module.__code__ = _code_for(id(type(module)), call_module.__code__)
    compiled: Callable[..., Any] = context(call_module)
    module._compiled_call_impl = compiled
    return compiled


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
        leave: called after, also when the call raises; with the result as well.
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
        result = None
        self._enter(self._module, args)
        try:
            result = self.call(*args, **kwargs)
            return result
        finally:
            self._leave(self._module, args, result)

    def remove(self) -> None:
        """Leaves the compiled call alone again."""
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self.call


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
        if "torch._dynamo" in sys.modules:
            with torch.compiler.set_stance("force_eager"):
                yield
        else:
            yield
    finally:
        for each, forward in zip(wrappers, former, strict=True):
            vars(each)["forward"] = forward


# Activation checkpointing


@contextlib.contextmanager
def checkpointing_replaced(
    replace: Callable[[Around, Reentrant], tuple[Around, Reentrant]],
) -> Iterator[None]:
    """Replaces the two kinds of torch's activation checkpointing inside the context.

    Libraries keep references to ``torch.utils.checkpoint.checkpoint`` itself (in partial functions,
    by ``from`` imports), so the two things that it looks up when it is called are replaced instead:
    the generator around a call with ``use_reentrant=False``, and the autograd function of the
    other kind.

    Args:
        replace: makes the replacements, given what they replace.
    """
    name = "_checkpoint_without_reentrant_generator"
    if hasattr(native_checkpoint, f"{name}_impl"):  # what torch calls from 2.14 on
        name = f"{name}_impl"
    around = getattr(native_checkpoint, name)
    function: Any = native_checkpoint.CheckpointFunction
    own = function.__dict__.get("apply")
    new_around, new_reentrant = replace(around, function.apply)
    setattr(native_checkpoint, name, new_around)
    function.apply = staticmethod(new_reentrant)
    try:
        yield
    finally:
        setattr(native_checkpoint, name, around)
        if own is None:
            del function.apply
        else:
            function.apply = own


# Gradients


def work_of(function: Callable[..., Any]) -> CellType:
    """Returns where a function of ``torch.nn.utils`` keeps the function that does its work.

    Each is a wrapper that switches gradients off; what it wraps is in its closure. Replaced there,
    it is replaced under every name that a script has given the function.

    Raises:
        UnsupportedError: this version of torch wraps it differently.
    """
    if isinstance(function, FunctionType) and function.__code__.co_freevars == ("func",):
        assert function.__closure__ is not None
        return function.__closure__[0]
    raise UnsupportedError(
        f"torch {torch.__version__} defines {function!r} in a way that this version of smp-torch "
        "does not know, so it cannot take norms over partitions: use a torch that it was made for."
    )


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each tensor to another one, which may have another type; a few kernels for all."""
    torch._foreach_copy_(list(targets), list(sources))


def multiply_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies tensors in place by a number that is on the device. Shape: scalar."""
    torch._foreach_mul_(list(tensors), factor)


def norms_of_all(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the norm of each tensor. Shape: (tensors,)."""
    return torch.stack(torch._foreach_norm(list(tensors)))


def all_gather_into(output: torch.Tensor, given: torch.Tensor, group: ProcessGroup) -> None:
    """Gathers equal tensors, one after the other along dim 0; by the name it has in this torch."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    function(output, given, group=group)


def start_all_gather_into(output: torch.Tensor, given: torch.Tensor, group: ProcessGroup) -> Any:
    """Starts the same; returns what can be waited for."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(output, given, group=group, async_op=True)


def reduce_scatter_into(output: torch.Tensor, given: torch.Tensor, group: ProcessGroup) -> None:
    """Sums tensors and scatters the sum; by the name it has in this torch."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(output, given, group=group)


def is_future(obj: object) -> bool:
    """Tells whether an object is a future, as communication hooks return them."""
    return isinstance(obj, torch._C.Future)


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Calls a function at the end of the backward pass in progress."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def gradient_buckets(parameters: Sequence[nn.Parameter], cap_bytes: int) -> list[GradBucket]:
    """Distributes parameters over buckets, the last parameters first.

    Args:
        parameters: those to reduce; at least one.
        cap_bytes: size of a bucket; the first is smaller, so that communication begins early.
    """
    dense = [False] * len(parameters)
    first_bytes = min(_DEFAULT_FIRST_BUCKET_BYTES, cap_bytes)
    indices, limits = _compute_bucket_assignment_by_size(
        list(parameters), [first_bytes, cap_bytes], dense
    )
    # Only torch's reducer can make a GradBucket. It serves for that alone, so it needs no peers;
    # when a gradient is final is for the caller to know, who differentiates in several passes.
    no_peers = ProcessGroup(0, 1)  # type: ignore[call-arg]
    reducer = Reducer(list(parameters), indices[::-1], limits[::-1], no_peers, dense, cap_bytes)
    reducer._remove_autograd_hooks()
    return list(reducer._get_zeros_like_grad_buckets())


# The test


def self_test() -> list[str]:
    """Uses everything above once.

    Returns:
        what the installed torch does otherwise than this package relies on, in words; empty if it
        has everything. (What is missing altogether fails when this module is imported.)
    """
    return [
        f"{check.__name__.lstrip('_').replace('_', ' ')}: {type(error).__name__}: {error}"
        for check in (
            _storages_and_versions,
            _modes,
            _compiled_modules,
            _checkpointing,
            _norms,
            _many_tensors,
            _buckets,
            _ends_of_backward_passes,
            _subclasses,
        )
        if (error := _failure(check)) is not None
    ]


def _failure(check: Callable[[], None]) -> Exception | None:
    try:
        check()
    except Exception as error:
        return error
    return None


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"{what} does not hold in torch {torch.__version__}")


def _storages_and_versions() -> None:
    tensor = torch.zeros(4)
    _expect(storage_of(tensor) == storage_of(tensor[1:]), "a view shares the storage")
    before = version_of(tensor)
    tensor[1:].add_(1)
    _expect(version_of(tensor) > before, "a change through a view raises the version")


def _modes() -> None:
    with FakeTensorMode():
        fake = torch.empty(2)
        _expect(isinstance(fake, FakeTensor), "a tensor made in the fake mode is fake")
        _expect(computes_on_fakes(), "the fake mode is known to be on")
        with past_recording():
            _expect(not isinstance(torch.empty(2), FakeTensor), "a real one can be made inside")
            _expect(not computes_on_fakes(), "the fake mode is known to be off")
        with past_dispatch_modes():
            _expect(not isinstance(torch.empty(2), FakeTensor), "dispatch modes can be left")
        try:
            fake.nonzero()
        except DATA_DEPENDENT:
            pass
        else:
            _expect(False, "a shape that depends on data is refused on fakes")
    with past_all_modes():
        set_grad_enabled(torch.is_grad_enabled())
    with TorchFunctionMode() as mode, without_function_modes(TorchFunctionMode):
        _expect(_innermost_mode() is None, "function modes can be left")
    _expect(mode is not None, "and are there again")
    _expect(callable(next(iter(flop_registry.values()))), "FLOPs are counted by formulas")
    _expect(pytree.tree_leaves({"a": [1]}) == [1], "nested structures are flattened")
    _expect(isinstance(torch.ops.aten.add.Tensor, OpOverload), "operations have overloads")


def _compiled_modules() -> None:
    ran = []

    def backend(graph: Any, inputs: Any) -> Any:
        ran.append("compiled")
        return graph.forward

    class Module(nn.Module):  # one of torch's own alone is not worth compiling
        def forward(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * 2

    module, other = Module(), Module()
    module.compile(backend=backend)
    wrapped: Any = torch.compile(Module(), backend=backend)
    around = AroundCompiled(module, lambda *_: ran.append("before"), lambda *_: ran.append("after"))
    with run_eagerly([module, wrapped]):
        module(torch.zeros(1)), wrapped(torch.zeros(1))
    _expect(ran == ["before", "after"], "compiled code can run as it is written")
    module(torch.zeros(1))
    _expect(ran[2:] == ["before", "compiled", "after"], "and compiled, with something around it")
    around.remove()
    compiled = torch.compile(_failure, backend=backend)
    _expect(as_written(compiled) is _failure, "a compiled function tells what it was made of")
    for each in (module, wrapped):
        ran.clear()
        torch.compiler.reset()
        compile_like(compiled_call(each), other)
        other(torch.zeros(1))
        _expect(ran == ["compiled"], "a module is compiled as another one was")
        forget_compiled(other)
    torch.compiler.reset()


def _checkpointing() -> None:
    seen = []

    def replace(around: Around, reentrant: Reentrant) -> tuple[Around, Reentrant]:
        def note_around(*args: Any, **kwargs: Any) -> Iterator[None]:
            seen.append("generator")
            yield from around(*args, **kwargs)

        def note_reentrant(*args: Any) -> Any:
            seen.append("function")
            return reentrant(*args)

        return note_around, note_reentrant

    tensor = torch.ones(1, requires_grad=True)
    with checkpointing_replaced(replace):
        for use_reentrant in (False, True):
            native_checkpoint.checkpoint(torch.sin, tensor, use_reentrant=use_reentrant)
    _expect(seen == ["generator", "function"], "checkpointing goes through what is replaced")


def _norms() -> None:
    for function in (nn.utils.clip_grad_norm_, nn.utils.get_total_norm):
        _expect(callable(work_of(function).cell_contents), f"{function.__name__} is wrapped")


def _many_tensors() -> None:
    halves = [torch.ones(2, dtype=torch.float16), torch.ones(3, dtype=torch.float16)]
    copy_all(halves, [torch.tensor([6.0, 8.0]), torch.full((3,), 4.0)])
    multiply_all(halves, torch.tensor(0.5))
    _expect(norms_of_all([halves[0].float()]).tolist() == [5.0], "functions of many tensors")
    _expect(halves[1].tolist() == [2.0] * 3, "functions of many tensors")


def _buckets() -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    found = [
        each for bucket in gradient_buckets(parameters, 1 << 20) for each in bucket.gradients()
    ]
    _expect(sum(each.numel() for each in found) == 6, "gradients have places in buckets")
    _expect(is_future(torch.futures.Future()), "futures are known")


def _ends_of_backward_passes() -> None:
    called = []
    tensor = torch.ones(1, requires_grad=True)
    tensor.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient: when_backward_ends(lambda: called.append(True))
    )
    torch.autograd.backward(tensor.sum())
    _expect(called == [True], "the end of a backward pass can be waited for")


def _subclasses() -> None:
    called: list[Any] = []

    class Noting(nn.Parameter):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.append(func)
            with past_subclass_functions():
                return func(*args, **(kwargs or {}))

    parameter: Any = nn.Parameter(torch.ones(2))
    parameter.__class__ = Noting
    version = parameter._version
    _expect(called == [ABOUT_TENSORS[1]], "attributes of a subclass go through its function")
    packed: list[Any] = []

    def pack(tensor: torch.Tensor) -> int:
        packed.append(tensor)
        return 3

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda _: torch.full((2,), 3.0)):
        product = parameter * torch.ones(2, requires_grad=True) * parameter
    _expect(any(each is parameter for each in packed), "a parameter is saved as it is")
    with past_subclass_functions():
        parameter.data = torch.full((1,), float("nan")).expand(2)
        _expect(parameter._version == version, "other memory is no change")
    seen: list[bool] = []
    parameter.register_post_accumulate_grad_hook(lambda _: seen.append(is_in_backward()))
    product.sum().backward()
    _expect(seen == [True] and not is_in_backward(), "backward passes are known")
    _expect(bool(parameter.grad.isfinite().all()), "what was packed is unpacked")


def is_of_control_flow(error: BaseException) -> bool:
    """Tells whether torch's own control flow (``torch.cond`` and the like) could not run here."""
    return type(error).__name__ == "UncapturedHigherOrderOpError" or (
        "HigherOrderOperator" in str(error)
    )
