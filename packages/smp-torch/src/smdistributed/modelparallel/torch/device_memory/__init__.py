"""What the memory of a rank's device holds, by kind, and what to do where it is not enough."""
