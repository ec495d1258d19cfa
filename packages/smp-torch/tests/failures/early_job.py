"""A job of two ranks in which rank 1 ends, with code 0, a step before the other.

Usage: early_job.py KIND, of the way in which the ranks share work.
"""

import sys
import time

import torch
from torch import nn

import smdistributed.modelparallel.torch as smp

KINDS = {
    "tensor": {"tensor_parallel_degree": 2},
    "shards": {"sharded_data_parallel_degree": 2},
    "optimizer": {"shard_optimizer_state": True},
    "replicas": {},
}
smp.init({"ddp": True, "communication_timeout": 60, **KINDS[sys.argv[1]]})
with smp.tensor_parallelism(enabled=sys.argv[1] == "tensor"):
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
model = smp.DistributedModel(net)
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))


@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


for step in range(3):
    if step == 2 and smp.rank() == 1:
        print("LEFT", time.time(), flush=True)
        sys.exit(0)
    optimizer.zero_grad()
    train(model, torch.ones(2, 8))
    optimizer.step()
