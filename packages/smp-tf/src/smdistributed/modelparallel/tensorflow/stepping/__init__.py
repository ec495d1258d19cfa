"""A step function: arguments as microbatches, the body for each, one result."""
