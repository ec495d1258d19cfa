"""A call of a step function: agree on what runs, find or record it, run it, return its results."""
