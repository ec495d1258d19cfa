"""What both frameworks promise."""
