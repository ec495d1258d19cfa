"""The intermediate representation of one captured microbatch of a step.

A ``Graph`` is a list of nodes in execution order. Tensor states, defined once:

- *input*: a tensor among the step function's arguments; every rank can have it.
- *attribute*: a parameter or buffer that glue code reads; a parameter lives on its owner's rank.
- *leaf*: one call of a module that sits whole on one partition; opaque.
- *call*: glue, one call of a torch function outside all leaves.
- *replicated*: a value that depends on inputs, buffers and constants only and carries no gradient;
  ranks that need it compute it again instead of receiving it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from smdistributed.modelparallel.torch.pipeline.structure import Path, placeholders


class NodeKind(enum.Enum):
    """What a node does."""

    INPUT = "input"
    CONSTANT = "constant"
    ATTRIBUTE = "attribute"
    LEAF = "leaf"
    CALL = "call"


class Value:
    """A tensor that a node produces.

    Attributes:
        index: position among the values of the graph.
        node: the producer.
        source: where it stands in the producer's result; or the value whose tensor the producer
            changed in place.
        replaced_by: the node that later changes this tensor in place, or None.
    """

    __slots__ = (
        "device",
        "dtype",
        "index",
        "node",
        "num_bytes",
        "replaced_by",
        "replicated",
        "requires_grad",
        "shape",
        "source",
    )

    def __init__(self, index: int, node: Node, source: Path | Value, tensor: torch.Tensor) -> None:
        self.index = index
        self.node = node
        self.source = source
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.device = tensor.device
        self.requires_grad = tensor.requires_grad
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.replicated = node.replicated
        self.replaced_by: Node | None = None

    def __repr__(self) -> str:
        return f"v{self.index}"


@dataclass(eq=False)
class Node:
    """One step of the graph.

    Attributes:
        target: INPUT: position among the step's tensor arguments; CONSTANT: the tensor; ATTRIBUTE:
            (module, attribute name); LEAF: the module; CALL: the torch function.
        name: what it is called in plans, messages and digests; the same on every rank.
        args, kwargs: templates with ``Value`` placeholders.
        grad_enabled, autocast: the state it ran under; autocast is the dtype, or None when off.
        random: draws random numbers.
        changes: values whose tensors it changes in place.
        rank: pp_rank that runs it; -1 while undecided or replicated.
        segment: index of its segment; -1 likewise.
    """

    index: int
    kind: NodeKind
    target: Any
    name: str
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    grad_enabled: bool = True
    autocast: torch.dtype | None = None
    random: bool = False
    replicated: bool = False
    flops: int = 0
    outputs: list[Value] = field(default_factory=list)
    changes: list[Value] = field(default_factory=list)
    aliases: list[Value] = field(default_factory=list)
    rank: int = -1
    segment: int = -1

    @property
    def inputs(self) -> Iterator[Value]:
        """The values it reads."""
        return placeholders((self.args, self.kwargs), Value)

    def __repr__(self) -> str:
        return f"{self.outputs} = {self.name}"


@dataclass(eq=False)
class Guard:
    """A plain value that glue code took from step inputs; a replay is right only while it holds."""

    name: str
    function: Any
    args: Any
    kwargs: Any
    expected: Any

    @property
    def inputs(self) -> Iterator[Value]:
        """The values it reads."""
        return placeholders((self.args, self.kwargs), Value)


class Graph:
    """One captured microbatch.

    Attributes:
        nodes: in execution order.
        guards: what must hold of the step's inputs.
        roots: the values that ``backward`` was called on.
        result: template of what the step function returned.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.num_values = 0
        self.guards: list[Guard] = []
        self.roots: list[Value] = []
        self.result: Any = None

    def add(self, node: Node) -> Node:
        """Appends a node."""
        self.nodes.append(node)
        return node

    def bind(self, tensor: torch.Tensor, node: Node, source: Path | Value) -> Value:
        """Makes the value for one tensor of a node's result."""
        value = Value(self.num_values, node, source, tensor)
        self.num_values += 1
        node.outputs.append(value)
        return value

    @property
    def returned(self) -> list[Value]:
        """The distinct values that the step function returned, in order."""
        return list(dict.fromkeys(placeholders(self.result, Value)))
