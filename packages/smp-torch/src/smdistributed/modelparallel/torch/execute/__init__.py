"""Running a plan on one rank: computing, sending, receiving."""
