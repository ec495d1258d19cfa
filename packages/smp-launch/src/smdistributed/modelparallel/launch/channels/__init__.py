"""How a job gets its data."""
