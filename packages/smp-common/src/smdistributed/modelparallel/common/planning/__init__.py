"""Planning a pipeline: pure functions from costs to partitions, orders of work and pictures."""
