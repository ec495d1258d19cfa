"""Stands where TensorFlow may be: TensorBoard would import it, for seconds in each process."""

raise ImportError("users of PyTorch need no TensorFlow")
