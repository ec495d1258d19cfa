"""The optimizer that replaces the user's, and its state."""
