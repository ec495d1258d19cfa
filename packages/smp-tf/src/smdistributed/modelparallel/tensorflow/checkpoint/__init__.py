"""Checkpoints that do not depend on how a model is cut."""
