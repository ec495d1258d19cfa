"""Backward passes and the hooks in them, beyond PyTorch's public API."""

from __future__ import annotations

import contextlib
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import _C
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

_MARK = "smp: seen"
#: Where torch defines the hooks by which one function gets the gradients of several tensors.
_OF_SEVERAL = f"{torch.autograd.graph.register_multi_grad_hook.__name__}.<locals>."


def saved_tensors_hooks() -> Any:
    """Returns the innermost hooks of saved tensors that code is inside of; None outside of any."""
    return _C._autograd._top_saved_tensors_default_hooks(True)


@contextlib.contextmanager
def lifted_by_transforms(pack: Callable[..., Any], unpack: Callable[..., Any]) -> Iterator[None]:
    """Inside, transforms of torch.func run without these hooks of saved tensors, if no others are.

    They refuse to run with any. What they save is kept as it is.
    """
    module: Any = torch.autograd.graph
    disabled = module.disable_saved_tensors_hooks

    @contextlib.contextmanager
    def disable(message: str) -> Iterator[None]:
        is_own = saved_tensors_hooks() == (pack, unpack)
        if is_own:
            _C._autograd._pop_saved_tensors_default_hooks()
        try:
            with disabled(message):
                yield
        finally:
            if is_own:
                _C._autograd._push_saved_tensors_default_hooks(pack, unpack)

    module.disable_saved_tensors_hooks = disable
    try:
        yield
    finally:
        module.disable_saved_tensors_hooks = disabled


def will_be_reached(node: Node) -> bool:
    """Whether the backward pass that runs in this thread will come to a node of the graph."""
    return _C._will_engine_execute_node(node)


def is_in_backward() -> bool:
    """Tells whether a backward pass is running in this thread."""
    return backward_pass_id() != -1


def backward_pass_id() -> int:
    """Returns a number of the backward pass that runs in this thread; -1 if none does."""
    return _C._current_graph_task_id()


def number_of_node(tensor: torch.Tensor) -> int:
    """Returns a number of what computed a tensor, for autograd; -1 for a leaf."""
    node: Any = tensor.grad_fn
    return -1 if node is None else int(node._sequence_nr())


def hooks_on_gradient(tensor: torch.Tensor) -> tuple[Callable[..., Any], ...]:
    """Returns the hooks that get the gradient of a tensor."""
    return tuple((tensor._backward_hooks or {}).values())


def hooks_after_accumulation(tensor: torch.Tensor) -> Sequence[Callable[[torch.Tensor], None]]:
    """Returns the hooks that a leaf calls when its gradient has been added up."""
    return tuple((tensor._post_accumulate_grad_hooks or {}).values())


class Several(NamedTuple):
    """A function that gets the gradients of several tensors, or of the first that has one.

    Attributes:
        key: the same object for each of the tensors.
        number: of the tensors; 0 if the function gets the first gradient alone.
        function: gets them.
    """

    key: Any
    number: int
    function: Callable[..., Any]


def hook_of_several(hook: Any) -> Several | None:
    """Returns what torch has made a hook of by ``register_multi_grad_hook``; None if it has not."""
    code = getattr(hook, "__code__", None)
    if not isinstance(code, types.CodeType) or not code.co_qualname.startswith(_OF_SEVERAL):
        return None
    kept = {
        name: cell.cell_contents
        for name, cell in zip(code.co_freevars, hook.__closure__, strict=True)
    }
    return Several(kept["lock"], kept.get("len_tensors", 0), kept["fn"])


class _OwnHooks:
    """Counts the hooks of this library."""

    number = 0


def put_own_hook(register: Callable[..., RemovableHandle], hook: Callable[..., Any]) -> None:
    """Registers a hook of this library, which ``number_of_hooks_ever`` leaves out.

    Each step has such hooks, and where others may have been registered they are looked for.

    Args:
        register: the method of a tensor or a node that takes a hook.
        hook: the hook.
    """
    register(hook)
    _OwnHooks.number += 1


def number_of_hooks_ever() -> int:
    """Returns how many hooks of any kind others have registered in this process."""
    return int(RemovableHandle.next_id) - _OwnHooks.number


def hooks_of_accumulation(
    leaf: torch.Tensor,
) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Returns the hooks before and after what adds up the gradient of a leaf, by autograd's node.

    Which tensors do not know of; they live as long as somebody keeps the node.
    """
    node = get_gradient_edge(leaf).node
    return _listed(node.register_prehook), _listed(node.register_hook)


def _listed(register: Callable[..., RemovableHandle]) -> list[Callable[..., Any]]:
    """Returns the hooks in the dict that one more is put into, for a moment."""
    handle = register(lambda *_: None)
    found = handle.hooks_dict_ref()
    handle.remove()
    return list((found or {}).values())


@contextlib.contextmanager
def hooks_of_nodes_seen(see: Callable[[], None]) -> Iterator[None]:
    """Inside, a function is called before a node of autograd takes a hook."""
    module: Any = torch.autograd.Function
    register = module._register_hook

    def see_and_register(*args: Any) -> Any:
        see()
        return register(*args)

    module._register_hook = staticmethod(see_and_register)
    try:
        yield
    finally:
        del module._register_hook


def is_accumulation_kept(leaf: torch.Tensor) -> bool:
    """Whether somebody keeps what adds up the gradient of a leaf: a graph of autograd, say.

    It may have hooks; and in later graphs, too, it runs on the stream of the first one.
    """
    _notes_of(leaf)[_MARK] = True  # goes with what it is put on, unless somebody keeps that
    return _MARK in _notes_of(leaf)


def _notes_of(leaf: torch.Tensor) -> Any:
    """Returns the dict of what adds up the gradient of a leaf, which is for anybody."""
    # Which a view shows; of a fake in a twentieth of the time without the Python of fakes.
    with torch._C._DisableTorchDispatch():
        return get_gradient_edge(leaf).node.metadata


@contextlib.contextmanager
def accumulations_seen(
    leaves: Iterable[torch.Tensor], see: Callable[[torch.Tensor], None]
) -> Iterator[None]:
    """Inside, leaves call ``see`` when their gradient has been added up, and no hook of theirs."""
    former = [(leaf, leaf._post_accumulate_grad_hooks) for leaf in leaves]
    for leaf, _ in former:
        leaf._post_accumulate_grad_hooks = {0: see}
    try:
        yield
    finally:
        for leaf, hooks in former:
            # None would leave the hook in place, and autograd would go on to call it.
            leaf._post_accumulate_grad_hooks = OrderedDict() if hooks is None else hooks


@contextlib.contextmanager
def engine_replaced(stand_in: Callable[..., Any]) -> Iterator[None]:
    """Inside, another function does what all functions of torch call to differentiate.

    Args:
        stand_in: gets torch's own, what is differentiated, the gradients that it starts with,
            whether the graph is kept, whether it gets one of its own, the tensors whose gradients
            are wanted, and by name whether these are added up (``accumulate_grad``).
    """
    module: Any = torch.autograd
    run = module._engine_run_backward
    module._engine_run_backward = functools.partial(stand_in, run)
    try:
        yield
    finally:
        module._engine_run_backward = run


@contextlib.contextmanager
def engine_as_it_is() -> Iterator[None]:
    """Inside, functions of torch call torch's own to differentiate, whatever has replaced it."""
    module: Any = torch.autograd
    replaced = module._engine_run_backward
    module._engine_run_backward = torch.autograd.graph._engine_run_backward
    try:
        yield
    finally:
        module._engine_run_backward = replaced


def applied_alone(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Returns ``function.apply`` for where no transform of torch.func is at work; it costs less."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found


def is_of_freed_graph(error: RuntimeError) -> bool:
    """Whether a backward pass came to what one before has let go of."""
    return "backward through the graph a second time" in str(error)


def is_without_graph(error: RuntimeError) -> bool:
    """Whether something was differentiated that was computed without gradients."""
    return "does not require grad and does not have a grad_fn" in str(error)


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Calls a function at the end of the backward pass in progress."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


@contextlib.contextmanager
def applications_replaced(stand_in: Callable[..., Any]) -> Iterator[None]:
    """Inside, another function does what all autograd functions come to by ``apply``.

    Also those that were looked up before.

    Args:
        stand_in: gets torch's own, bound to the function, and its arguments.
    """
    kind: Any = torch.autograd.function._SingleLevelFunction
    real: Any = _C._FunctionBase.__dict__["apply"]

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        return stand_in(real.__get__(None, function), *args, **kwargs)

    former = kind.__dict__.get("apply")
    kind.apply = classmethod(apply)
    try:
        yield
    finally:
        if former is None:
            del kind.apply
        else:
            kind.apply = former
