"""Trains a small model over two partitions, and says how it is served."""

import argparse
import os

import torch

import smdistributed.modelparallel.torch as smp


def make_net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def model_fn(model_dir):
    net = make_net()
    net.load_state_dict(torch.load(os.path.join(model_dir, "model.pt")))
    return net.eval()


@smp.step
def train_step(model, inputs):
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    model.backward(loss)
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    arguments, _ = parser.parse_known_args()
    smp.init()
    model = smp.DistributedModel(make_net())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.load(os.path.join(os.environ["SM_CHANNEL_TRAIN"], "inputs.pt"))
    if smp.rank() == 0:
        print("files of test:", sorted(os.listdir(os.environ["SM_CHANNEL_TEST"])))
    for step in range(arguments.steps):
        optimizer.zero_grad()
        loss = train_step(model, inputs).reduce_mean()
        optimizer.step()
        if smp.rank() == 0:
            print(f"step {step} loss: {loss.item():.6f}")
    state = model.state_dict()
    if smp.rank() == 0:
        torch.save(state, os.path.join(os.environ["SM_MODEL_DIR"], "model.pt"))


if __name__ == "__main__":
    main()
