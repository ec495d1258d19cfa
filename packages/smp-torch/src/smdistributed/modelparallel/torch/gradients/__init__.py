"""Gradients beyond one rank: averaged over replicas, normed and checked over partitions."""
