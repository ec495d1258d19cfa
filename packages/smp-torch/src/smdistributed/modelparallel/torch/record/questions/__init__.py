"""What Python asks about values while it runs on fakes, and who answers."""
