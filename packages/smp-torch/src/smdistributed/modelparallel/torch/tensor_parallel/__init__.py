"""Splitting modules over the tensor-parallel ranks: who, how, and what they exchange."""
