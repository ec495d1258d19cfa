"""Activations that are computed again in the backward pass."""
