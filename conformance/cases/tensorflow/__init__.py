"""What TensorFlow alone promises."""
