"""Scripts as users write them: one source runs as plain PyTorch and with the library.

A script takes a ``Kit``: a model, an optimizer, a step function are what it makes of them, and
``note`` tells the numbers that it prints. These, and all parameters and buffers in the end, must be
those of plain PyTorch, or the library must refuse the script with an error of its own.

``python -m scripts NAME... --world pp2``, in the folder above, runs some and says what became of
each.
"""
