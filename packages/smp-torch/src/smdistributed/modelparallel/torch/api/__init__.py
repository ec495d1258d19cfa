"""The public functions and classes, bound to the runtime of this process."""
