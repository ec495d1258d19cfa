"""Where each variable lives."""
