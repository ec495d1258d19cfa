"""The checks that optimizers with two moments share."""

from __future__ import annotations


def check_moments(
    name: str,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
) -> None:
    """Checks arguments of an optimizer.

    Raises:
        ValueError: one is out of its range; names it.
        RuntimeError: ``amsgrad`` is True.
    """
    if amsgrad:
        raise RuntimeError(f"{name} has no AMSGrad variant; received amsgrad=True: leave it False.")
    for argument, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ValueError(f"{name}: {argument} must be at least 0; received {value!r}.")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(
            f"{name}: betas must be two numbers from 0 to below 1; received {betas!r}."
        )
