"""Gradients over replicas and over partitions."""
