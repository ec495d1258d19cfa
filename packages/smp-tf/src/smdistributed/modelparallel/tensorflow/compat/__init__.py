"""What is used of TensorFlow and of Keras beyond their public APIs."""
