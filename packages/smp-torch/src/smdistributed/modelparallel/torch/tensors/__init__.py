"""What is known of a tensor but for its values, and of structures that tensors are in.

- ``spec.TensorSpec``: shape, strides, dtype, device, whether a gradient is wanted, at one moment.
- ``nested``: a structure with tensors in it is mapped, or becomes a *template*: plain data with a
  placeholder for each tensor, from which the structure is filled again.
- ``memory``, ``writes``: which memory a tensor is in, and whether somebody has written to it.
- ``written``: what an operation writes to, as versions do not count it all.
- ``contents``: the numbers themselves, compared and put back where nobody sees who writes.

``functions`` and ``stand_ins`` say what functions of torch mean where a call alone does not tell.
"""
