"""What a step costs, counted while it runs on fakes."""
