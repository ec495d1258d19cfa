"""Compatibility: translations between the states of Transformers and of tensor parallelism.

Without tensor parallelism a model's state is that of Transformers itself, so there is nothing to
translate; the modules below have the names that scripts import, and calling one says so.

Source: model-parallel-extended-features-pytorch-hugging-face.md.
"""
