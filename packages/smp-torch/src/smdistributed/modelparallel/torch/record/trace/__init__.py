"""What is written down of a step: a tree of calls, and what their tensors stand for."""
