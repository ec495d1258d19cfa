"""Whether the installed PyTorch does what is used of it beyond its public API."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as native_checkpoint

from smdistributed.modelparallel.torch.compat.private.attention import (
    attend,
    gives_log_sums,
    gradients_of,
)
from smdistributed.modelparallel.torch.compat.private.backward import (
    accumulations_seen,
    applied_alone,
    engine_as_it_is,
    engine_replaced,
    hook_of_several,
    hooks_of_accumulation,
    hooks_of_nodes_seen,
    hooks_on_gradient,
    is_accumulation_kept,
    is_in_backward,
    lifted_by_transforms,
    number_of_hooks_ever,
    put_own_hook,
    saved_tensors_hooks,
    when_backward_ends,
)
from smdistributed.modelparallel.torch.compat.private.below import (
    is_of_unusable_tensor,
    operated_by,
    past_operations,
    without_memory,
)
from smdistributed.modelparallel.torch.compat.private.checkpointing import (
    Around,
    Reentrant,
    checkpointing_replaced,
)
from smdistributed.modelparallel.torch.compat.private.compiled import (
    AroundCompiled,
    CompiledOtherwise,
    as_written,
    backend_of,
    backward_compilers_replaced,
    boxed,
    call_compiled,
    compile_like,
    compiled_call,
    forget_compiled,
    frame_left_alone,
    is_being_compiled,
    leaves_of_this_pass,
    run_eagerly,
)
from smdistributed.modelparallel.torch.compat.private.distributed import (
    exchanges,
    gradient_buckets,
    is_future,
)
from smdistributed.modelparallel.torch.compat.private.distributions import arguments_unchecked
from smdistributed.modelparallel.torch.compat.private.jagged import is_jagged, with_values
from smdistributed.modelparallel.torch.compat.private.layers import GIVING_SIZES
from smdistributed.modelparallel.torch.compat.private.modes import (
    DATA_DEPENDENT,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    _innermost_mode,
    computes_on_fakes,
    flop_registry,
    is_watched_by_others,
    past_all_modes,
    past_dispatch_modes,
    past_recording,
    past_subclass_functions,
    pytree,
    set_grad_enabled,
    without_function_modes,
)
from smdistributed.modelparallel.torch.compat.private.optimizers import (
    FUSED_ADAM,
    FUSED_ADAMW,
    has_step_hooks,
)
from smdistributed.modelparallel.torch.compat.private.tensors import (
    ABOUT_TENSORS,
    copy_all,
    multiply_all,
    norms_of_all,
    storage_of,
    version_of,
    work_of,
)


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
            _compiled_backward,
            _checkpointing,
            _norms,
            _many_tensors,
            _optimizers,
            _buckets,
            _collectives,
            _functions_alone,
            _sizes,
            _hooks_of_gradients,
            _ends_of_backward_passes,
            _subclasses,
            _tensors_without_memory,
            _who_differentiates,
            _attention,
            _rows_of_nested_tensors,
            _distributions,
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
    with torch.device("cpu"), TorchFunctionMode():
        _expect(is_watched_by_others(), "modes are told from that of a device")
    with TorchFunctionMode() as mode, without_function_modes(TorchFunctionMode):
        _expect(_innermost_mode() is None, "function modes can be left")
    _expect(mode is not None, "and are there again")
    _expect(callable(next(iter(flop_registry.values()))), "FLOPs are counted by formulas")
    _expect(pytree.tree_leaves({"a": [1]}) == [1], "nested structures are flattened")
    _expect(isinstance(torch.ops.aten.add.Tensor, OpOverload), "operations have overloads")


def _call_sum(tensor: torch.Tensor) -> torch.Tensor:
    return _sum(tensor)


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.abs().sum()


def _compiled_modules() -> None:
    ran = []

    def backend(graph: Any, inputs: Any) -> Any:
        ran.append("compiled")
        _expect(is_being_compiled(), "a compiler at work is known")
        return graph.forward

    _expect(not is_being_compiled(), "and one that is not")

    class Module(nn.Module):  # one of torch's own alone is not worth compiling
        def forward(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.abs() * 2

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
    ran.clear()
    alone = frame_left_alone(_call_sum)
    torch.compile(lambda tensor: alone(tensor), backend=backend)(torch.zeros(1))
    _expect(ran == ["compiled"], "what a function that is left alone calls is compiled")
    compiled = torch.compile(_failure, backend=backend)
    _expect(as_written(compiled) is _failure, "a compiled function tells what it was made of")
    for each in (module, wrapped):
        ran.clear()
        torch.compiler.reset()
        compile_like(compiled_call(each), other)
        other(torch.zeros(1))
        _expect(ran == ["compiled"], "a module is compiled as another one was")
        forget_compiled(other)

    _compiled_backward()


def _compiled_backward() -> None:
    leaves: list[Any] = []
    module = nn.Linear(2, 2, bias=False)

    def replace(compiler: Any) -> Any:
        def compile_backward(graph: Any, inputs: Any) -> Any:
            compiled = compiler(graph, inputs)

            @boxed
            def run(args: list[Any]) -> Any:
                leaves.extend(leaves_of_this_pass())
                return call_compiled(compiled, args)

            return run

        return compile_backward

    def backend(graph: Any, inputs: Any) -> Any:
        with backward_compilers_replaced(replace):
            return users(graph, inputs)

    class Own(nn.Module):  # one of torch's own alone is not worth compiling
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, tensor: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(tensor).sum()
            return result

    own = Own()
    own.compile(backend="aot_eager")
    users = backend_of(compiled_call(own))
    other = CompiledOtherwise(own, backend)
    other.begin()
    own(torch.ones(1, 2)).backward()
    other.end()
    _expect(backend_of(compiled_call(own)) is users, "and are again as the user had them")
    _expect(module.weight.grad is not None, "backward passes can be compiled in another way")
    _expect(any(each is module.weight for each in leaves), "and know whose gradients they compute")
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


def _optimizers() -> None:
    called = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in (FUSED_ADAM, FUSED_ADAMW):
                called.append((func, len(args), sorted(kwargs)))
            return func(*args, **(kwargs or {}))

    options = ("amsgrad", "beta1", "beta2", "eps", "found_inf", "grad_scale", "lr", "maximize")
    for kind, kernel in ((torch.optim.Adam, FUSED_ADAM), (torch.optim.AdamW, FUSED_ADAMW)):
        weight = nn.Parameter(torch.ones(4))
        weight.grad = torch.ones(4)
        optimizer = kind([weight], fused=True)
        with Watch():
            optimizer.step()
        _expect(
            called.pop() == (kernel, 6, [*options, "weight_decay"]),
            "a fused Adam calls its kernel with six lists",
        )
        _expect(not has_step_hooks(optimizer), "without hooks it has none")
        optimizer.register_step_pre_hook(print)
        _expect(has_step_hooks(optimizer), "a hook before its step is known")


def _buckets() -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    found = [
        each for bucket in gradient_buckets(parameters, 1 << 20) for each in bucket.gradients()
    ]
    _expect(sum(each.numel() for each in found) == 6, "gradients have places in buckets")
    _expect(is_future(torch.futures.Future()), "futures are known")


def _collectives() -> None:
    asked = inspect.unwrap(dist.barrier).__code__.co_names
    _expect(
        {"_rank_not_in_group", "_warn_not_in_group"} <= {*asked},
        "functions of torch.distributed ask whether this process is in their group",
    )
    _expect(exchanges(dist.all_reduce), "functions of torch.distributed are known")


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 3


def _functions_alone() -> None:
    given = torch.ones(2, requires_grad=True)
    made = applied_alone(_Doubled)(given)
    _expect(made.tolist() == [2.0, 2.0], "a function is applied")
    (found,) = torch.autograd.grad(made.sum(), given)
    _expect(found.tolist() == [3.0, 3.0], "a function's backward pass is its own")


def _sizes() -> None:
    seen = []

    class See(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with See():
        packed = pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 1]), batch_first=True)
        pad_packed_sequence(packed)
    _expect(packed.batch_sizes.tolist() == [2, 1, 1], "packed sequences have sizes on the host")
    _expect({*seen} >= GIVING_SIZES, "functions that pack sequences are known")


def _hooks_of_gradients() -> None:
    pair = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    before = number_of_hooks_ever()
    for mode, number in (("all", 2), ("any", 0)):
        torch.autograd.graph.register_multi_grad_hook(pair, print, mode=mode)  # type: ignore[arg-type]
        found = [hook_of_several(hooks_on_gradient(each)[-1]) for each in pair]
        _expect(
            all(each == (found[0].key, number, print) for each in found if each and found[0]),
            "a hook of several gradients is known",
        )
    _expect(hook_of_several(print) is None, "other hooks are none")
    node = torch.autograd.graph.get_gradient_edge(pair[0]).node
    seen: list[bool] = []
    with hooks_of_nodes_seen(lambda: seen.append(True)):
        node.register_prehook(max)
        node.register_hook(min)
    _expect(len(seen) == 2, "hooks of nodes are seen")
    _expect(hooks_of_accumulation(pair[0]) == ([max], [min]), "hooks of nodes are listed")
    _expect(number_of_hooks_ever() >= before + 6, "hooks are counted")
    before = number_of_hooks_ever()
    put_own_hook(pair[0].register_hook, max)
    put_own_hook(node.register_prehook, min)
    _expect(number_of_hooks_ever() == before, "a hook that is put is one")
    leaf = nn.Parameter(torch.ones(1))
    added: list[torch.Tensor] = []
    with accumulations_seen([leaf], added.append):
        torch.autograd.backward(leaf.sum())
    torch.autograd.backward(leaf.sum())
    _expect(len(added) == 1, "what sees gradients added up can be taken away")


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
    _expect(is_accumulation_kept(parameter), "a graph keeps what adds a gradient up")
    seen: list[bool] = []
    parameter.register_post_accumulate_grad_hook(lambda _: seen.append(is_in_backward()))
    product.sum().backward()
    _expect(seen == [True] and not is_in_backward(), "backward passes are known")
    _expect(bool(parameter.grad.isfinite().all()), "what was packed is unpacked")


class _Lent(nn.Parameter):
    @classmethod
    def operate(cls, func: Any, args: Any, kwargs: Any) -> Any:
        with past_operations():
            args[0].data = torch.ones(2)
        return func(*args, **kwargs)


def _tensors_without_memory() -> None:
    lent: Any = nn.Parameter(torch.zeros(2))
    with past_operations():
        lent.data = without_memory(lent.shape, lent.dtype, lent.device)
    lent.__class__ = _Lent
    try:
        lent.data_ptr()
    except RuntimeError as error:
        _expect(is_of_unusable_tensor(error), "it is known that there is no memory")
    else:
        _expect(False, "there is no memory")
    found = torch.func.vmap(torch.neg)(lent)
    _expect(found.tolist() == [-1.0, -1.0], "an operation comes to the class of its tensor")
    _expect(operated_by(lent) is None, "a tensor can be given memory")
    lent.data = without_memory(torch.Size((3, 4)), lent.dtype, lent.device, _Lent)
    with past_subclass_functions():
        data = lent.data
    _expect(data.shape == (3, 4), "one without memory can have any shape")
    _expect(operated_by(data) is _Lent, "what shares its data is known")


def _who_differentiates() -> None:
    def twice(run: Any, tensors: Any, starts: Any, *args: Any, **options: Any) -> Any:
        seen.append(options["accumulate_grad"])
        return run(tensors, tuple(2 * each for each in starts), *args, **options)

    seen: list[bool] = []
    leaf = nn.Parameter(torch.ones(1))
    with engine_replaced(twice):
        torch.autograd.backward(leaf.sum())
        (slope,) = torch.autograd.grad(leaf.sum(), leaf)
        with engine_as_it_is():
            (own,) = torch.autograd.grad(leaf.sum(), leaf)
    _expect(seen == [True, False], "one function differentiates, and is told what for")
    _expect(own.item() == 1, "it can be left out")
    _expect(leaf.grad is not None and leaf.grad.item() == slope.item() == 2, "it gets its start")

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, pack),
        lifted_by_transforms(pack, pack),
    ):
        found = torch.func.grad(torch.square)(torch.ones(()))
        _expect(saved_tensors_hooks() == (pack, pack), "hooks are put back")
    _expect(found.item() == 2, "a transform runs without hooks")


def _attention() -> None:
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 6, 8)
    _expect(gives_log_sums(query, query, query, None), "attention that gives its log-sums")
    attended = attend(query, key, key, 1.0, is_causal=False)
    scores = query @ key.repeat_interleave(2, 1).mT
    _expect(torch.allclose(attended.log_sums, scores.logsumexp(-1), atol=1e-5), "their values")
    found = gradients_of(query, query, key, key, attended, 1.0, is_causal=False)
    of_value = (scores.softmax(-1).mT @ query).view(1, 2, 2, 6, 8).sum(2)
    _expect(torch.allclose(found[2], of_value, atol=1e-5), "gradients of attention")


def _rows_of_nested_tensors() -> None:
    rows = [torch.ones(length, 2) for length in (3, 1)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    _expect(is_jagged(nested) and not is_jagged(rows[0]), "a nested tensor is told from others")
    made = with_values(nested, nested.values() * 2)
    padded = torch.nested.to_padded_tensor(made, 0.0)
    _expect(padded.shape == (2, 3, 2), "the longest of its rows is known")


def _distributions() -> None:
    with arguments_unchecked():
        found = torch.distributions.Categorical(logits=torch.full((2, 3), torch.nan))
    _expect(not found._validate_args, "a distribution that does not check its arguments")
