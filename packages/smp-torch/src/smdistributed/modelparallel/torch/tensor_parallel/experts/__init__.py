"""Experts that are stacked in one module, spread over the ranks of a tensor-parallel group."""
