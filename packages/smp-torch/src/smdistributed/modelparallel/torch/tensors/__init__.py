"""What is known of a tensor but for its values."""
