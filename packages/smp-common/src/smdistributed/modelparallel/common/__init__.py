"""Communication, ranks, configuration and planning; imports no machine-learning framework."""
