"""The public functions, bound to the runtime of this process; alone in reading its slot."""
