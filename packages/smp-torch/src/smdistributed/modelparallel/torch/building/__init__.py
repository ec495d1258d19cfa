"""What a model is told while it is built: its partitions, and to wait for memory."""
