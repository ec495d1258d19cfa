"""The state of this process, its start, and its watch over the others."""
