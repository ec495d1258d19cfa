"""What Python holds: whether it has changed, what to call it, how to put it back."""
