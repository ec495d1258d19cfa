"""Models of Transformers that become distributed modules, and translations of their states.

Source: model-parallel-extended-features-pytorch-hugging-face.md.
"""
