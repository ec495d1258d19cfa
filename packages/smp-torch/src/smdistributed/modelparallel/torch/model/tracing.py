"""What a user asks to be measured while a model is recorded."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class TracingOptions:
    """The arguments of ``DistributedModel`` that are about tracing.

    Attributes:
        trace_execution_times: costs are the seconds that operations take, not their number.
        trace_memory_usage: the memory of activations is that of the tensors that are kept for the
            backward pass, not that of all tensors that a forward pass makes.

    Raises:
        TypeError: a value is no bool.
    """

    trace_execution_times: bool = False
    trace_memory_usage: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                raise TypeError(f"{field.name} must be True or False; received {value!r}.")
