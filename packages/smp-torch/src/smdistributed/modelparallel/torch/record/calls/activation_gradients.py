"""Hooks on activations, and activations whose gradient is kept: by code between the modules.

No rank has a gradient while Python runs. A hook is Python all the same, and runs where one process
would run it: in ``model.backward``, in each microbatch, on every rank, on a fake of the gradient.
What it computes is written down, and computed where the gradient is, when the backward pass comes
to it (``torch.execute.activation_gradients``). What it stores, counts or logs is Python like that
of the step.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smdistributed.modelparallel.common.errors import UnsupportedError
from smdistributed.modelparallel.torch.compat.private.modes import FakeTensor
from smdistributed.modelparallel.torch.record.calls.known import KnownCalls
from smdistributed.modelparallel.torch.record.microbatch import Context, Microbatch
from smdistributed.modelparallel.torch.record.trace.tree import Entry, EntryKind

_TENSOR: Any = torch.Tensor
_REGISTER, _RETAIN, _READ = _TENSOR.register_hook, _TENSOR.retain_grad, _TENSOR.grad.__get__
_Hook = Callable[[torch.Tensor], torch.Tensor | None]


class ActivationGradients:
    """The gradients of activations that the code of one microbatch looks at.

    Args:
        context: of the recorder.
        now: the microbatch.
        known: calls that the trace has.
    """

    def __init__(self, context: Context, now: Microbatch, known: KnownCalls) -> None:
        self._context = context
        self._now = now
        self._known = known
        self.let_go()

    def let_go(self) -> None:
        """Keeps nothing that holds fakes."""
        self._hooks: dict[int, collections.OrderedDict[int, _Hook]] = {}
        self._retained: set[int] = set()
        #: What ``grad`` gives, by the identity of an activation.
        self._found: dict[int, torch.Tensor] = {}
        self._roots: list[torch.Tensor] = []

    def concerns(self, function: Any, args: Any) -> bool:
        """Whether a call of a torch function is about the gradient of an activation.

        A module that may turn out to be a leaf, and does so, is made one: there it runs as it is.
        """
        if function not in (_REGISTER, _RETAIN, _READ):
            return False
        tensor = self._now.fake(args[0])
        if not isinstance(tensor, FakeTensor) or id(tensor) in self._context.scene.slots:
            return False
        if (module := self._within()) is None:
            return True
        if function != _READ:
            self._context.calls.keep_whole(module, "it looks at gradients of its activations")
        return False

    def _within(self) -> nn.Module | None:
        """Returns the innermost module in progress that may turn out to be a leaf."""
        span = self._now.span
        return None if span is None or span.module in self._context.scene.roots else span.module

    def call(self, function: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the call of a torch function that ``concerns`` them."""
        tensor = self._now.fake(tensor)
        if function == _READ:
            return self._gradient_of(tensor)
        if not self._now.requires_grad(tensor):
            function(tensor, *args, **kwargs)  # which says that it has none
        self._watch(tensor)
        if function == _RETAIN:
            self._retained.add(id(tensor))
            return None
        return self._add(tensor, *args, **kwargs)

    def _add(self, tensor: torch.Tensor, hook: _Hook) -> RemovableHandle:
        hooks = self._hooks.setdefault(id(tensor), collections.OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def _watch(self, tensor: torch.Tensor) -> None:
        """Writes down that the backward pass is to tell of a tensor."""
        name = "a hook on an activation, or retain_grad()"
        self._entry(EntryKind.WATCHED, name, (tensor,), lambda entry: None)

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

    def arrive(self, root: torch.Tensor, backward: Entry) -> None:
        """Runs the hooks to which a backward pass comes.

        Args:
            root: that it starts at.
            backward: its entry.
        """
        self._roots.append(root)
        for tensor in backward.result or ():
            self._arrive_at(tensor, list(self._hooks.get(id(tensor), {}).values()))

    def reached(self, root: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the watched tensors to which a new backward pass comes, in that order."""
        values = self._now.values
        watched = [each.args[0] for each in self._now.log if each.kind is EntryKind.WATCHED]
        if not watched:
            return ()
        assert values is not None
        by_value = {values.of(each): each for each in watched}
        return tuple(by_value[each] for each in values.activations_of(root) if each in by_value)

    def _arrive_at(self, tensor: torch.Tensor, hooks: Sequence[_Hook] = ()) -> torch.Tensor | None:
        """Runs hooks of a tensor; returns its gradient, None if it gets none."""
        entry = self._entry(EntryKind.GRADIENT, "a gradient", (tensor,), self._make)
        given: torch.Tensor | None = entry.result
        if given is None:
            return None
        gradient = given
        with torch.no_grad():
            for hook in hooks:
                changed = hook(gradient)
                gradient = gradient if changed is None else self._checked(changed, tensor)
        self._entry(EntryKind.HOOKED, "hooks", (tensor, gradient), lambda entry: None)
        self._found[id(tensor)] = gradient
        return gradient

    def _make(self, entry: Entry) -> None:
        """Completes the entry of the gradient of a tensor, if a backward pass has come to it."""
        values = self._now.values
        assert values is not None
        (tensor,) = entry.args
        value = values.of(tensor)
        if any(value in set(values.activations_of(root)) for root in self._roots):
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
        if not (id(tensor) in self._retained or tensor.is_leaf) or not self._roots:
            return None
        if id(tensor) not in self._found and self._now.requires_grad(tensor):
            return self._arrive_at(tensor)
        return self._found.get(id(tensor))
