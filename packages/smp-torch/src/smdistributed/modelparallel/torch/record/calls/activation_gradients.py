"""Hooks on activations, and activations whose gradient is kept.

No rank has a gradient while Python runs. A hook is Python all the same, and runs where one process
would run it: in ``model.backward``, in each microbatch, on every rank, on a fake of the gradient.
What it computes is written down, and computed where the gradient is, when the backward pass comes
to it (``torch.planning.late_values``). What it stores, counts or logs is Python like that of the
step.

Such are hooks on what code between modules has, and those that are lifted out of modules
(``lifted_hooks``).
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.backward import hook_of_several
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor, past_recording
from smdistributed.modelparallel.torch.record.calls.known import KnownCalls
from smdistributed.modelparallel.torch.record.calls.lifted_hooks import (
    forward_hook_of,
)
from smdistributed.modelparallel.torch.record.leaves.attributes import LeafAttributes
from smdistributed.modelparallel.torch.record.microbatch import Context, Microbatch
from smdistributed.modelparallel.torch.record.trace.tree import Entry, EntryKind

_TENSOR: Any = torch.Tensor
_REGISTER, _RETAIN = _TENSOR.register_hook, _TENSOR.retain_grad
_READ, _SET = _TENSOR.grad.__get__, _TENSOR.grad.__set__
#: Functions of torch that may concern the gradient of an activation.
OF_GRADIENTS = frozenset({_REGISTER, _RETAIN, _READ, _SET})
_Hook = Callable[..., Any]
#: With the module whose forward hook has put it there, if one has.
_Hooks = MutableMapping[int, tuple[nn.Module | None, _Hook]]


@dataclass(eq=False)
class _HookedCall:
    """The call of a module whose hooks look at its gradients.

    Attributes:
        module: the module.
        before, behind: its hooks, on gradients of what it gave, and of what it was given as well.
        inputs, outputs: the tensors that take part; None for others.
        whole: it is known what it was given: it is called by code between modules.
        waits_for: identities of those to which the backward pass has yet to come.
        is_begun: the hooks of the first kind have run.
    """

    module: nn.Module
    before: Sequence[_Hook]
    behind: Sequence[_Hook]
    inputs: Sequence[torch.Tensor | None]
    outputs: Sequence[torch.Tensor | None]
    whole: bool
    waits_for: set[int]
    is_begun: bool = False

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """Those by whose gradients it is known."""
        for each in (*self.outputs, *(self.inputs if self.whole else ())):
            if each is not None:
                yield each

    def needs(self, tensor: torch.Tensor) -> bool:
        """Whether the gradient of a tensor may still be changed by it."""
        if any(each is tensor for each in self.outputs):
            return not self.is_begun
        return bool(self.waits_for) and any(each is tensor for each in self.inputs)


class ActivationGradients:
    """The gradients of activations that the code of one microbatch looks at.

    Args:
        context: of the recorder.
        now: the microbatch.
        known: calls that the trace has.
        attributes: of the leaves.
    """

    def __init__(
        self, context: Context, now: Microbatch, known: KnownCalls, attributes: LeafAttributes
    ) -> None:
        self._attributes = attributes
        self._context = context
        self._now = now
        self._known = known
        #: The leaf whose forward hooks are called.
        self._hooks_of: nn.Module | None = None
        self.let_go()

    def let_go(self) -> None:
        """Keeps nothing that holds fakes."""
        self._hooks: dict[int, _Hooks] = {}
        self._retained: set[int] = set()
        self._calls: list[_HookedCall] = []
        #: What the gradients of activations are now, by their identity.
        self._gradients: dict[int, torch.Tensor] = {}
        self._roots: list[_Root] = []
        #: The leaves of autograd whose gradient the script has taken, by their identity.
        self._taken: dict[int, torch.Tensor] = {}
        #: How many backward passes there were when the script put a gradient away.
        self._put_away: dict[int, int] = {}
        #: What is done when the call of a leaf that is in progress is written down.
        self._later: list[Callable[[], object]] = []

    # ------------------------------------------------------------------ what is looked at

    def concerns(self, function: Any, args: Any) -> bool:
        """Whether a call of a torch function is about the gradient of an activation.

        A module that may turn out to be a leaf, and does so, is made one: there it runs as it is.
        """
        if function not in OF_GRADIENTS:
            return False
        tensor, state = self._now.fake(args[0]), self._context.state
        if not isinstance(tensor, FakeTensor) or id(tensor) in self._context.scene.slots:
            return False
        if state.paused or state.leaf_depth:
            hooked = self._hooks_of if state.paused else forward_hook_of()
            is_hook = function in (_REGISTER, _RETAIN)
            return is_hook and hooked is not None and not self._asks(function, args)
        span = self._now.span
        if span is None or span.module in self._context.scene.roots:
            return True
        if function in (_READ, _SET):
            return False
        if forward_hook_of() is not None and not self._asks(function, args):
            while span is not None:
                span.entry.lifts = True
                span = span.parent
            return True
        self._context.calls.keep_whole(span.module, "it looks at gradients of its activations")
        return False

    def _asks(self, function: Any, args: Any) -> bool:
        """Whether what is put on a tensor asks for the value of its gradient."""
        return function == _REGISTER and self._context.calls.asks(args[1], args[0])

    def call(self, function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the call of a torch function that ``concerns`` them."""
        tensor = self._now.fake(tensor)
        if function == _READ:
            return self._gradient_of(tensor)
        if function == _SET:
            return self._put(tensor, *args)
        if not self._now.requires_grad(tensor):
            function(tensor, *args, **kwargs)  # which says that it has none
        if function == _RETAIN:
            self._soon(lambda: self._retained.add(self._watched(tensor)))
            return None
        return self._add(tensor, *args, **kwargs)

    def _add(self, tensor: torch.Tensor, hook: _Hook) -> RemovableHandle:
        if hook_of_several(hook) is not None:
            raise UnsupportedError(
                "torch.autograd.graph.register_multi_grad_hook was called in "
                f"{self._context.calls.where()} with an activation, while a pipelined step runs: "
                "each rank has a backward pass of its own, and no hook gets the gradients of all. "
                "Put a hook on each tensor (tensor.register_hook), or do it inside one module."
            )
        hooks: _Hooks = collections.OrderedDict()
        handle = RemovableHandle(hooks)
        hooks[handle.id] = self._hooks_of or forward_hook_of(), hook

        def add() -> None:
            known = self._hooks.setdefault(self._watched(tensor), hooks)
            if known is not hooks:
                known.update(hooks)
                handle.hooks_dict_ref = weakref.ref(known)

        self._soon(add)
        return handle

    def _soon(self, act: Callable[[], object]) -> None:
        """Does something now, or when the leaf in progress, which makes the tensor, is known."""
        if self._context.state.paused or self._context.state.leaf_depth:
            self._later.append(act)
        else:
            act()

    def _watched(self, tensor: torch.Tensor) -> int:
        """Writes down that the backward pass is to tell of a tensor; returns its identity."""
        tensor = self._now.fake(tensor)
        name = "a hook on an activation, or retain_grad()"
        self._entry(EntryKind.WATCHED, name, (tensor,), lambda entry: None)
        return id(tensor)

    # ------------------------------------------------------------------ modules

    @property
    def lifts(self) -> bool:
        """Whether hooks are lifted out of the leaf in progress."""
        return bool(self._later)

    @contextlib.contextmanager
    def calling_hooks(self, leaf: nn.Module) -> Iterator[None]:
        """Inside, the forward hooks of a leaf whose call is known are called."""
        self._hooks_of = leaf
        try:
            yield
        finally:
            self._hooks_of = None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, a leaf runs for what it shows; nothing is looked at."""
        later, self._later = self._later, []
        try:
            yield
        finally:
            self._later = later

    def settle(self) -> None:
        """Takes note that a leaf, which was in progress, is written down."""
        later, self._later = self._later, []
        for act in later:
            act()

    def is_lifted(self, module: nn.Module) -> bool:
        """Whether the hooks on the backward pass of a module are lifted out of it."""
        return module in self._context.scene.lifted.modules and torch.is_grad_enabled()

    def call_module(
        self, module: nn.Module, args: tuple[Any, ...], call: Callable[[tuple[Any, ...]], Any]
    ) -> Any:
        """Calls a module whose hooks on its backward pass are lifted out of it."""
        state = self._context.state
        before = list(module._backward_pre_hooks.values())
        behind = list(module._backward_hooks.values())
        whole = not state.leaf_depth
        if whole:
            # What it is given may be used elsewhere, too.
            args = tuple(each.view_as(each) if _takes_part(each) else each for each in args)
        with self._context.scene.lifted.taken_off([module]):
            result = call(args)
        inputs = [each if _takes_part(each) else None for each in args]
        given = result if isinstance(result, tuple) else (result,)
        outputs = [each if _takes_part(each) else None for each in given]
        found = _HookedCall(module, before, behind, inputs, outputs, whole, set())
        self._soon(lambda: self._note(found))
        return result

    def _note(self, call: _HookedCall) -> None:
        def fakes(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
            return [None if each is None else self._now.fake(each) for each in tensors]

        call.inputs, call.outputs = fakes(call.inputs), fakes(call.outputs)
        for tensor in call.tensors:
            self._watched(tensor)
        self._calls.append(call)

    # ------------------------------------------------------------------ the backward pass

    def _entry(
        self, kind: EntryKind, name: str, args: Any, complete: Callable[[Entry], None]
    ) -> Entry:
        """Returns the entry of what happens now: it is known, or written down."""
        now = self._now
        with self._context.state.pausing():
            entry = self._known.match(kind, None, args, {})
            if entry is not None:
                self._known.answer(entry, lambda: None)
                return entry
            entry = Entry(kind, name=name, where=self._context.calls.where())
            now.go_live()
            entry.args = now.template(args, name)
            entry.region = self._context.state.region
            complete(entry)
            now.add(entry)
            return entry

    def reached(self, root: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the watched tensors to which a new backward pass comes, in that order."""
        values = self._now.values
        watched = [each.args[0] for each in self._now.log if each.kind is EntryKind.WATCHED]
        if not watched:
            return ()
        assert values is not None
        by_value = {values.of(each): each for each in watched}
        return tuple(by_value[each] for each in values.activations_of(root) if each in by_value)

    def check_asked(self, outputs: Sequence[torch.Tensor]) -> None:
        """Makes sure that nobody looks at gradients on the way of those that the script asks for.

        Args:
            outputs: what ``torch.autograd.grad`` is to differentiate.

        Raises:
            UnsupportedError: one process would run hooks meanwhile.
        """
        if any(each.kind is EntryKind.WATCHED for each in self._now.log):
            with self._context.state.pausing():
                self._now.go_live()
                watched = [tensor for each in outputs for tensor in self.reached(each)]
            if any(map(self._is_looked_at, watched)):
                raise UnsupportedError(
                    f"torch.autograd.grad in {self._context.calls.where()} comes to an activation "
                    "that has a hook, or to a module that has one on its backward pass, or whose "
                    "gradient is kept (retain_grad), while a pipelined step runs: hooks there run "
                    "in model.backward alone. Put them behind the call, or ask for that gradient "
                    "by torch.autograd.grad too."
                )

    def arrive(self, root: torch.Tensor, backward: Entry) -> None:
        """Runs the hooks to which a backward pass comes.

        Args:
            root: that it starts at.
            backward: its entry.
        """
        self._roots.append(_Root(root, backward.target))
        for tensor in self._taken.values():
            # The tensor that the script has grows, too.
            self._take(tensor, self._roots[-1:], self._gradients[id(tensor)])
        reached = [each for each in backward.result or () if self._is_looked_at(each)]
        identities = set(map(id, reached))
        for call in self._calls:
            call.waits_for = identities.intersection(map(id, call.tensors))
            call.is_begun = False
        open_ones: list[torch.Tensor] = []
        for tensor in reached:
            if self._arrive_at(tensor):
                open_ones.append(tensor)
            for call in self._calls:
                self._arrive_in(call, tensor)
            for each in open_ones:
                if not any(call.needs(each) for call in self._calls):
                    self._leave(each)
            open_ones = [e for e in open_ones if any(call.needs(e) for call in self._calls)]

    def _is_looked_at(self, tensor: torch.Tensor) -> bool:
        """Whether this microbatch watches a tensor, which may be within what is a leaf by now."""
        if id(tensor) in self._hooks or id(tensor) in self._retained:
            return True
        return any(each is tensor for call in self._calls for each in call.tensors)

    def _arrive_at(self, tensor: torch.Tensor) -> bool:
        """Runs the hooks of a tensor; returns whether the backward pass comes to it."""
        entry = self._arriving(tensor, self._roots[-1:])
        if entry.result is None:
            return False
        self._gradients[id(tensor)] = entry.result
        for module, hook in list(self._hooks.get(id(tensor), {}).values()):
            with self._in_hooks(module):
                self._change(tensor, hook(self._gradients[id(tensor)]))
        return True

    @contextlib.contextmanager
    def _in_hooks(self, module: nn.Module | None) -> Iterator[None]:
        """Inside, a hook runs that a module, or one of its forward hooks, has: it may set these."""
        leaf = None if module is None else self._context.scene.leaf_of.get(module)
        with (
            torch.no_grad(),
            contextlib.nullcontext() if leaf is None else self._attributes.set_by_hooks(leaf),
        ):
            yield

    def _arrive_in(self, call: _HookedCall, tensor: torch.Tensor) -> None:
        """Runs the hooks of a module when the backward pass has come to all that they wait for."""
        if id(tensor) not in call.waits_for:
            return
        call.waits_for.remove(id(tensor))
        outputs = self._found(call.outputs)
        if not call.is_begun and call.waits_for.isdisjoint(map(id, call.outputs)):
            with self._in_hooks(call.module):
                for hook in call.before:
                    self._change_each(call.outputs, hook(call.module, outputs))
                    outputs = self._found(call.outputs)
            call.is_begun = True
        if not call.waits_for:
            inputs = self._found(call.inputs) if call.whole else self._unknown(call.inputs)
            with self._in_hooks(call.module):
                for hook in call.behind:
                    self._change_each(call.inputs, hook(call.module, inputs, outputs), call.whole)
                    inputs = self._found(call.inputs) if call.whole else inputs

    def _found(self, tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if each is None else self._gradients.get(id(each)) for each in tensors)

    def _unknown(self, tensors: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Returns what stands for gradients within a module that stays whole: none may be used."""
        with self._context.state.pausing():
            return tuple(
                None if each is None else torch.empty_like(each, requires_grad=False)
                for each in tensors
            )

    def _change_each(
        self, tensors: Sequence[torch.Tensor | None], changed: Any, is_known: bool = True
    ) -> None:
        """Takes what a hook of a module has made of gradients."""
        if changed is None:
            return
        if not is_known:
            raise UnsupportedError(
                "a hook on the backward pass of a module changes the gradient of what the module "
                "is given, within a module that stays whole, while a pipelined step runs. Change "
                "what the module gives, by register_full_backward_pre_hook, or do it in the "
                "forward of the module."
            )
        changed = changed if isinstance(changed, tuple) else (changed,)
        if len(changed) != len(tensors):
            raise RuntimeError(
                f"a hook on the backward pass of a module returned {len(changed)} gradients of "
                f"{len(tensors)}."
            )
        for tensor, each in zip(tensors, changed, strict=True):
            if tensor is not None and id(tensor) in self._gradients:
                self._change(tensor, each)

    def _change(self, tensor: torch.Tensor, changed: Any) -> None:
        if changed is not None:
            self._gradients[id(tensor)] = self._checked(changed, tensor)

    def _leave(self, tensor: torch.Tensor) -> None:
        """Writes down what has become of the gradient of a tensor."""
        gradient = self._gradients[id(tensor)]
        self._entry(EntryKind.HOOKED, "hooks", (tensor, gradient), lambda entry: None)

    def _make(self, entry: Entry) -> None:
        """Completes the entry of the gradient of a tensor, if a backward pass has come to it."""
        values = self._now.values
        assert values is not None
        tensor, roots, *_ = entry.args
        if any(values.may_reach(tensor, root) for root in roots):
            with torch.no_grad():
                self._now.keep_result(entry, torch.empty_like(tensor, requires_grad=False))

    def _checked(self, changed: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Returns what a hook has made of a gradient.

        Raises:
            TypeError: it is no tensor.
            RuntimeError: it is not the gradient of the tensor.
            UnsupportedError: it is not known what it is made of.
        """
        if not isinstance(changed, torch.Tensor):
            raise TypeError(
                f"a hook on an activation returns None or a tensor; it returned a "
                f"{type(changed).__name__}."
            )
        changed = self._now.fake(changed)
        if changed.shape != tensor.shape or changed.dtype != tensor.dtype:
            raise RuntimeError(
                f"a hook on an activation of shape {tuple(tensor.shape)} ({tensor.dtype}) returned "
                f"a gradient of shape {tuple(changed.shape)} ({changed.dtype})."
            )
        if not isinstance(changed, FakeTensor):
            raise UnsupportedError(
                "a hook on an activation returned a tensor that it did not compute from the "
                "gradient or from tensors of the step: return gradient * 0 + tensor."
            )
        return changed

    def _gradient_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns what ``tensor.grad`` is now."""
        is_kept = id(tensor) in self._retained
        if not is_kept and tensor.is_leaf and id(tensor) not in self._gradients:
            roots = self._roots[self._put_away.get(id(tensor), 0) :]
            if roots and self._now.requires_grad(tensor):
                self._take(tensor, roots, None)
        return self._gradients.get(id(tensor)) if is_kept or tensor.is_leaf else None

    def _put(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Stands in for ``tensor.grad = gradient``."""
        if gradient is not None or not tensor.is_leaf or id(tensor) in self._hooks:
            raise UnsupportedError(
                f"the gradient of an activation or an input is assigned in "
                f"{self._context.calls.where()} while a pipelined step runs: it may be put away "
                "(x.grad = None), of a tensor without hooks that no call of the step computes. "
                "Compute with a tensor of your own."
            )
        self._gradients.pop(id(tensor), None)
        self._taken.pop(id(tensor), None)
        self._put_away[id(tensor)] = len(self._roots)

    def _take(
        self, tensor: torch.Tensor, roots: Sequence[_Root], former: torch.Tensor | None
    ) -> None:
        """Takes the gradient of a leaf of autograd.

        Args:
            tensor: the leaf.
            roots: of the backward passes that may have come to it since.
            former: what it was before; None: nothing.
        """
        entry = self._arriving(tensor, roots, former)
        if entry.result is not None and former is None:
            self._gradients[id(tensor)] = entry.result
            self._taken[id(tensor)] = tensor
            self._leave(tensor)

    def _arriving(
        self, tensor: torch.Tensor, roots: Sequence[_Root], former: torch.Tensor | None = None
    ) -> Entry:
        """Returns the entry of a gradient, whose result is None if no backward pass gives any."""
        starts = tuple(each.start(self._now) for each in roots)
        args = tensor, tuple(each.tensor for each in roots), starts, former
        return self._entry(EntryKind.GRADIENT, "a gradient", args, self._make)


@dataclass(eq=False)
class _Root:
    """What a backward pass starts at.

    Attributes:
        tensor: the loss.
        module: whose ``backward`` it was.
    """

    tensor: torch.Tensor
    module: nn.Module
    _start: torch.Tensor | None = None

    def start(self, now: Microbatch) -> torch.Tensor | None:
        """Returns the gradient that it starts with; None if that is not known yet."""
        share = now.share_of(self.module)
        if share is not None and self._start is None:
            with past_recording():
                self._start = torch.full(
                    self.tensor.shape, share, dtype=self.tensor.dtype, device=self.tensor.device
                )
        return self._start


def _takes_part(obj: Any) -> bool:
    return isinstance(obj, torch.Tensor) and obj.requires_grad
