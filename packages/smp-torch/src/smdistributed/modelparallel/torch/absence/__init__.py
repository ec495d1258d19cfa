"""Tensors of other partitions, as a script sees them between two steps."""
