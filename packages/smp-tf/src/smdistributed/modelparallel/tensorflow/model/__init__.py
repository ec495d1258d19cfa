"""``DistributedModel``, and what Keras does with it."""
