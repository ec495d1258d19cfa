"""``smp.model``: the class that scripts test for, and what stands behind it."""

from smdistributed.modelparallel.torch.model.distributed import DistributedModel as DistributedModel
