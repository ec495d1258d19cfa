"""What a script has added to a module, which another one in its place would not have."""

from __future__ import annotations

from typing import Any

from torch import nn

#: Where a module has the hooks of its calls.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN_PACKAGE = __name__.partition(".")[0]


def additions_to(module: nn.Module) -> str | None:
    """Returns why a module cannot be replaced; None if nothing has been added to it."""
    for name, each in module.named_modules():
        where = f"its module {name}" if name else "it"
        if any(state for state in map(vars(each).get, HOOKS)):
            return f"{where} has hooks, which a distributed module would not have"
        if _is_of_others(vars(each).get("forward")):
            return f"{where} has a forward of its own instance, which nothing else would run"
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"its parameter {name} has hooks, which a slice would not have"
    return None


def _is_of_others(forward: Any) -> bool:
    """Whether it is not one that this library has put there, as checkpointing does."""
    kind = type(forward).__module__.partition(".")[0]
    return forward is not None and kind != _OWN_PACKAGE
