"""Planning a script that is not changed for it, and running a line of the plan as it is printed."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.config import load
from smdistributed.modelparallel.common.errors import ConfigError
from smdistributed.modelparallel.common.launcher import plan
from smdistributed.modelparallel.common.planning.pass_memory import PassMemory
from smdistributed.modelparallel.common.search.devices import device_of
from smdistributed.modelparallel.common.search.measurement import (
    MEASURE_VARIABLE,
    Measured,
    Wanted,
)
from smdistributed.modelparallel.common.search.profile import ModelProfile
from smdistributed.modelparallel.common.search.stages import Cutter
from smdistributed.modelparallel.common.testing import run_ranks

pytestmark = pytest.mark.multiproc

#: Examples that take longer than the Python that computes them, so that pipelines are worth it.
LARGE = 1 << 14

NET = """
from torch import nn
from torch.nn import functional as F

WIDTH = 48


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_net():
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, 8))
"""
SCRIPT = """
import os
import sys
import torch
import smdistributed.modelparallel.torch as smp
from net import WIDTH, make_net

BATCH = int(sys.argv[1])
degrees = {"pipeline_parallel_degree": 4} if "SMP_PROFILE" in os.environ else {}
smp.init({"auto": True} if "auto" in sys.argv else {"microbatches": 2, "ddp": True, **degrees})
print(f"{smp.pp_size()} partitions, {smp.rdp_size()} replicas", flush=True)
with smp.delay_param_initialization():
    net = make_net()
if BATCH == 8:
    smp.set_tensor_parallelism(net, auto=True)
for block in net[:4] if "again" in sys.argv else ():
    smp.set_activation_checkpointing(block)
model = smp.DistributedModel(net)
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1.0)


@smp.step
def evaluate(model, x):
    return model(x).square().mean()


@smp.step
def train(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


x = torch.ones(BATCH, WIDTH)[smp.dp_rank() :: smp.dp_size()]
with torch.no_grad():
    print(f"before: {evaluate(model, x).reduce_mean().item()}", flush=True)
print(f"parameters are delayed: {net[0].up.weight.is_meta}", flush=True)
try:
    for _ in range(100 if "measured" in sys.argv else 1):
        train(model, x)
        optimizer.step()
    print("trained", flush=True)
finally:
    print("the script has ended", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "net.py").write_text(NET)
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.fixture(scope="module")
def planned(folder: Path) -> tuple[str, dict[str, Any]]:
    """What planning has printed, and the plan."""
    words = ["train.py", "--devices", "2", "--device", "cpu", "--memory", "1GiB"]
    program = (
        "import sys; from smdistributed.modelparallel.common.launcher import plan; "
        "sys.exit(plan.main(sys.argv[1:], prog='plan'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words, "--json", "plan.json", "--", str(LARGE)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "plan.json").read_text())


def test_a_script_is_planned_for_as_it_is(planned: tuple[str, dict[str, Any]]) -> None:
    out, document = planned
    assert "before: 0.0\nparameters are delayed: True\ntrain: " in out
    assert "the script has ended" not in out
    assert document["batch"] == LARGE
    degrees = {each["parameters"]["pipeline_parallel_degree"] for each in document["best"]}
    assert degrees == {1, 2}


def test_a_line_runs_as_it_is_printed(folder: Path, planned: tuple[str, dict[str, Any]]) -> None:
    lines = [
        each for each in planned[1]["best"] if each["parameters"]["pipeline_parallel_degree"] == 2
    ]
    command = shlex.split(lines[0]["command"])
    assert " ".join(command) in planned[0]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2


def kept_by_a_microbatch(examples: int) -> int:
    """Returns the bytes that autograd keeps of a forward pass, parameters left out."""
    names: dict[str, Any] = {}
    exec(NET, names)
    net, sizes = names["make_net"](), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        sizes[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = net(torch.ones(examples, names["WIDTH"])).square().mean()
    assert loss.requires_grad
    for parameter in net.parameters():
        sizes.pop(parameter.data_ptr(), None)
    return sum(sizes.values())


def held_by(profile: ModelProfile) -> PassMemory:
    """Returns what the passes of a microbatch of 4 examples hold in one process."""
    stages = Cutter(profile, device_of("h100")).stages(1, 4, 1, v_shaped=False)
    assert stages is not None
    [piece] = stages.pieces
    return piece.memory


def test_the_profile_has_what_the_step_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    profile: ModelProfile = plan.recorded(["train.py", "8"], dict(plan.os.environ))
    whole = sum((unit.own for unit in profile.root.walk()), profile.beside)
    elements = 4 * (2 * 48 + 48 * 96 + 96 + 96 * 48 + 48) + 48 * 8 + 8
    num_parameters = 4 * 6 + 2
    assert (profile.batch, profile.examples, profile.precision) == (8, 4, "single")
    assert whole.trained_elements == elements
    assert whole.parameter_bytes == whole.gradient_bytes == 4 * elements
    # Two moments, and a count of steps for each parameter.
    assert whole.optimizer_bytes == 8 * elements + 4 * num_parameters
    assert whole.computation.of_weights == 2 * 4 * (4 * 2 * 48 * 96 + 48 * 8)
    # What it is given is there anyhow.
    assert held_by(profile).kept == kept_by_a_microbatch(4) - 4 * 4 * 48
    assert profile.given_bytes == 8 * 4 * 48
    assert profile.settings["pipeline_parallel_degree"] == 4
    # Tensor-parallel ranks share the weights; a block exchanges once for its two maps.
    assert whole.sliced_elements == 4 * 2 * 48 * 96 + 48 * 8
    assert whole.exchanged_bytes == 4 * 4 * 4 * 48


def test_what_is_computed_again_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    profile = plan.recorded(["train.py", "8", "again"], dict(plan.os.environ))
    whole = sum((unit.own for unit in profile.root.walk()), profile.beside)
    assert whole.recomputed.of_weights == 2 * 4 * (4 * 2 * 48 * 96)
    held = held_by(profile)
    # Inputs of the four blocks and of the last layer, and its result, which is squared.
    assert held.kept == 4 * 4 * (5 * 48 + 8)
    # A block keeps this while it is computed again, beside gradients of its widest activation and
    # of a weight.
    again, widest = 4 * 4 * (1 + 1 + 48 + 96 + 96), 4 * 4 * 96
    assert again < held.backward - held.kept - 4 * 48 * 96 < again + 2 * widest
    # A plan knows that of a script that computes nothing again.
    plain = plan.recorded(["train.py", "8"], dict(plan.os.environ))
    assert plain.stacks == (("0", "1", "2", "3"),)
    planned = plain.with_checkpoints(1)
    for recorded, figures in zip(profile.root.walk(), planned.root.walk(), strict=True):
        assert recorded.own == figures.own
    assert held_by(planned) == held


def test_a_job_takes_the_best_line_by_itself(folder: Path) -> None:
    outcome = run_ranks(
        2, folder / "train.py", launcher="smprun-fork", timeout=120, args=[LARGE, "auto"]
    )
    lines = outcome.stdout.splitlines()
    [taken] = (line for line in lines if "smp.init takes the first line: " in line)
    partitions = ast.literal_eval(taken.split("line: ")[1])["pipeline_parallel_degree"]
    words = f"{partitions} partitions, {2 // partitions} replicas"
    # Besides, the process that recorded the step has one of each.
    assert {"[0] " + words, "[1] " + words} <= set(lines)
    assert outcome.stdout.count("trained") == 2


def test_a_job_that_is_measured_ends_on_all_ranks(folder: Path) -> None:
    file = folder / "steps"
    outcome = run_ranks(
        2,
        folder / "train.py",
        launcher="smprun-fork",
        timeout=120,
        env={MEASURE_VARIABLE: Wanted(str(file), "train").to_variable()},
        args=[8, "measured"],
    )
    assert "parameters are delayed" in outcome.stdout
    assert "the script has ended" not in outcome.stdout
    found = Measured.read(file)
    assert found is not None
    assert (found.device, found.steps) == ("cpu", 10)


def counting() -> tuple[str, dict[str, Any]]:
    """Plans in a script, or not, and trains a module that counts and draws."""
    smp.init({"microbatches": 2, "ddp": True})
    torch.manual_seed(3)
    log: list[torch.Tensor] = []

    class Net(nn.Sequential):
        calls = 0

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            log.append(x)
            return super().forward(x)

    net = Net(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))

    @smp.step
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) * torch.arange(4.0)).square().mean()
        model.backward(loss)
        return loss

    def state() -> Any:
        tensors = [each.tolist() for each in net.state_dict().values()]
        return tensors, net.calls, len(log), [each.grad for each in net.parameters()]

    x = torch.arange(32.0).view(8, 4)
    before, draws = state(), torch.get_rng_state()
    plan = smp.plan(train, model, x, devices=2, device="cpu", memory="1GiB")
    assert (state(), torch.get_rng_state().tolist()) == (before, draws.tolist())
    train(model, x)
    optimizer.step()
    assert net.calls == len(log) == 2
    with pytest.raises(ConfigError, match="decorate it"):
        smp.plan(lambda x: x, x, devices=2)  # type: ignore[no-untyped-call]
    return plan.table(), dict(plan.best.config)


def test_a_script_plans_and_stays_as_it_was() -> None:
    [(table, config)] = run_ranks(1, counting, launcher="fork", timeout=60).results
    assert "2 x cpu, 1 GiB each" in table
    load("pytorch", config, environ={}).check_world(2, "pytorch")
