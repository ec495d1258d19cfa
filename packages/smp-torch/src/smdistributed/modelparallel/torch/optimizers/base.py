"""What the optimizers that stand for apex's have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Makes norms of what is here of some parameters, of an order, those of the whole ones.
WholeNorms = Callable[[Sequence[torch.Tensor], torch.Tensor, float], torch.Tensor]


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer with apex's arguments; a subclass says how parameters are updated.

    Args:
        params: parameters, or groups of them.
        defaults: the settings of groups.
        set_grad_none: ``zero_grad`` drops gradients; False: sets them to zero.

    Attributes:
        whole_norms: given by ``DistributedOptimizer``; None where every parameter is whole.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], *, set_grad_none: bool) -> None:
        super().__init__(params, defaults)
        self.set_grad_none = set_grad_none
        self.whole_norms: WholeNorms | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes states of others, too: apex counts steps by group, and others in Python."""
        super().__setstate__(state)
        for group in self.param_groups:
            for own in filter(None, map(self.state.get, group["params"])):
                steps = own.get("step", group.get("step", 0))
                own["step"] = torch.as_tensor(steps, dtype=torch.float32)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears the gradients."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Applies the gradients; see ``torch.optim.Optimizer.step``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = []
        for group in self.param_groups:
            updated = [each for each in group["params"] if each.grad is not None]
            if updated:
                groups.append((updated, group))
        self._update(groups)
        return loss

    def _update(self, groups: list[tuple[list[torch.Tensor], dict[str, Any]]]) -> None:
        """Updates the parameters of each group that have gradients."""
        raise NotImplementedError

    def _norms(
        self, parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], order: float
    ) -> list[torch.Tensor]:
        """Returns the norm of each tensor as one process has it, in single precision.

        Collective: TP_GROUP, if a parameter is split over it.

        Args:
            parameters: that the tensors belong to, and have the shape of.
            tensors: of which.
            order: 2, or infinite.
        """
        if not tensors:
            return []
        norms = [torch.linalg.vector_norm(each.float(), order) for each in tensors]
        if self.whole_norms is None:
            return norms
        return list(self.whole_norms(parameters, torch.stack(norms), order).unbind())
