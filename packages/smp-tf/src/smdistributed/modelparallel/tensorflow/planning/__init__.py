"""Where each operation runs: partitions, and the segments between two transfers."""
