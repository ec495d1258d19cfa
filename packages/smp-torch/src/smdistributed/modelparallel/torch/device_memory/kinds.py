"""The kinds of memory that a report tells apart, in its order."""

#: Weights and buffers of this rank; of shards its own.
PARAMETERS = "parameters"
#: Parameters that are gathered from shards, to compute with; in training gradients on their way.
GATHERED = "gathered"
#: Gradients, sums of them, and buckets in which they are exchanged.
GRADIENTS = "gradients"
#: What optimizers keep, masters included.
OPTIMIZER = "optimizer"
#: What passes hold at their fullest, as far as it is forecast; in use they are other tensors.
ACTIVATIONS = "activations"
#: All other tensors: activations, what passes make on their way, what a script keeps.
OTHER = "other tensors"
#: What captured passes keep from one step to the next.
CAPTURED = "captured passes"
#: What other GPUs read and write, but for parameters in it.
WINDOWS = "windows"
#: What PyTorch's allocator holds without using it.
UNUSED = "unused"
#: What lies outside of it: NCCL, kernels, other processes.
OUTSIDE = "outside PyTorch"
