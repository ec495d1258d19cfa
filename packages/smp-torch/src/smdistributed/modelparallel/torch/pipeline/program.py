"""Compiling a segment into a Python function.

Interpreting nodes costs a walk over every argument structure at each call. The generated function
is the straight-line code that a person would write: the same calls, in the same order, under the
same grad and autocast state, with intermediate results deleted at their last use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smdistributed.modelparallel.torch.pipeline.ir import Node, NodeKind, Value
from smdistributed.modelparallel.torch.pipeline.segments import Plan, SegmentNodes
from smdistributed.modelparallel.torch.pipeline.structure import Container, Path

#: (tensor arguments of the microbatch, the segment's inputs) -> its outputs
SegmentFunction = Callable[..., tuple[torch.Tensor, ...]]
_LITERALS = (type(None), bool, int, type(Ellipsis))


class Program:
    """The function of one segment.

    Args:
        plan: the plan that the segment belongs to.
        segment: the segment.
        device: where it runs.

    Attributes:
        source: the generated code, for people who debug.
    """

    def __init__(self, plan: Plan, segment: SegmentNodes, device: torch.device) -> None:
        self._device = device
        self._names: dict[str, Any] = {"torch": torch}
        self._constants: dict[int, str] = {}
        lines = self._lines(plan, segment)
        parameters = ", ".join(["inputs", *(f"v{value.index}" for value in segment.inputs)])
        results = "".join(f"v{value.index}, " for value in segment.outputs)
        self.source = "\n".join(
            [f"def segment_{segment.index}({parameters}):", *lines, f"    return ({results})"]
        )
        exec(compile(self.source, f"<segment {segment.index}>", "exec"), self._names)
        self.run: SegmentFunction = self._names[f"segment_{segment.index}"]

    def _lines(self, plan: Plan, segment: SegmentNodes) -> list[str]:
        # A cut value belongs to its producer: change a copy.
        lines = [
            f"    v{value.index} = v{value.index}.clone()"
            for value in segment.inputs
            if value in segment.changed
        ]
        last_use = _last_uses(segment)
        state: tuple[bool, torch.dtype | None] = (True, None)
        indent = "    "
        for node in segment.nodes:
            if node.kind in (NodeKind.LEAF, NodeKind.CALL) and self._state(node) != state:
                state = self._state(node)
                header, indent = self._with(state)
                lines += header
            for line in self._node(node):
                lines.append(indent + line)
            dead = [f"v{value.index}" for value in last_use.get(node, ())]
            if dead:
                lines.append(indent + "del " + ", ".join(dead))
        return lines

    @staticmethod
    def _state(node: Node) -> tuple[bool, torch.dtype | None]:
        return node.grad_enabled, node.autocast

    def _with(self, state: tuple[bool, torch.dtype | None]) -> tuple[list[str], str]:
        managers = []
        if not state[0]:
            managers.append("torch.no_grad()")
        if state[1] is not None:
            managers.append(f"torch.autocast({self._device.type!r}, dtype={state[1]})")
        if not managers:
            return [], "    "
        return [f"    with {', '.join(managers)}:"], "        "

    def _node(self, node: Node) -> list[str]:
        if node.kind is NodeKind.INPUT:
            return [f"v{node.outputs[0].index} = inputs[{node.target}]"]
        if node.kind is NodeKind.CONSTANT:
            return [f"v{node.outputs[0].index} = {self._constant(node.target)}"]
        if node.kind is NodeKind.ATTRIBUTE:
            module, name = node.target
            return [f"v{node.outputs[0].index} = {self._constant(module)}.{name}"]
        arguments = [self._expression(item) for item in node.args]
        arguments += [f"{key}={self._expression(item)}" for key, item in node.kwargs.items()]
        lines = [f"result = {self._constant(node.target)}({', '.join(arguments)})"]
        for output in node.outputs:
            if isinstance(output.source, Value):
                expression = f"v{output.source.index}"
            else:
                expression = "result" + _access(output.source)
            lines.append(f"v{output.index} = {expression}")
        lines.append("del result")
        return lines

    def _constant(self, obj: Any) -> str:
        name = self._constants.setdefault(id(obj), f"c{len(self._constants)}")
        self._names[name] = obj
        return name

    def _expression(self, obj: Any) -> str:
        if isinstance(obj, Value):
            return f"v{obj.index}"
        if type(obj) in _LITERALS:
            return repr(obj)
        if type(obj) is tuple:
            return "(" + "".join(self._expression(item) + ", " for item in obj) + ")"
        if type(obj) is list:
            return "[" + ", ".join(self._expression(item) for item in obj) + "]"
        if type(obj) is dict:
            items = (f"{self._key(key)}: {self._expression(item)}" for key, item in obj.items())
            return "{" + ", ".join(items) + "}"
        if type(obj) is slice:
            parts = (self._expression(part) for part in (obj.start, obj.stop, obj.step))
            return f"slice({', '.join(parts)})"
        if isinstance(obj, Container):
            return f"{self._constant(obj)}.build({self._expression(obj.items)})"
        return self._constant(obj)

    def _key(self, key: Any) -> str:
        return repr(key) if isinstance(key, str | int) else self._constant(key)


def _access(path: Path) -> str:
    return "".join(f"[{key!r}]" if kind == "item" else f".{key}" for kind, key in path)


def _last_uses(segment: SegmentNodes) -> dict[Node, list[Value]]:
    """Returns, for each node, the values that nothing after it needs."""
    last: dict[Value, Node] = {}
    for node in segment.nodes:
        for value in node.outputs:
            last[value] = node
            if isinstance(value.source, Value):
                last[value.source] = node
        for value in node.inputs:
            last[value] = node
    dead: dict[Node, list[Value]] = {}
    kept = set(segment.outputs)
    for value, node in last.items():
        if value not in kept:
            dead.setdefault(node, []).append(value)
    return dead
