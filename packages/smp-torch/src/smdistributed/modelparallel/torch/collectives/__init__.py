"""Exchanging parts of tensors within a group of ranks, behind one interface."""
