"""TensorFlow: ``CheckpointManager``."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.adapters import adapter_of
from conformance.cases.common.starting import quickly
from conformance.cases.tensorflow.training import stepped
from conformance.registry import tensorflow_case
from smdistributed.modelparallel.common.testing import run_ranks

_SOME = ("alone", "pipeline", "both")


@contextlib.contextmanager
def shared_folder(adapter: Any) -> Iterator[Path]:
    """Within, a folder that all processes see. Collective: every process."""
    smp = adapter.smp
    name = tempfile.mkdtemp(prefix="smp-conformance-") if smp.rank() == 0 else ""
    folder = Path(smp.allgather(name, smp.WORLD)[0])
    try:
        yield folder
        smp.barrier()
    finally:
        if smp.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


class Training:
    """A model, its optimizer, and a batch: what a script keeps in a checkpoint."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.model = adapter.chain()
        self.optimizer = adapter.tf.keras.optimizers.Adam(0.05)
        self.step = stepped(adapter, self.model)
        self.batch = [adapter.tensor(adapter.batch(8, seed=seed)) for seed in (0, 1)]
        self.checkpoint = adapter.tf.train.Checkpoint(optimizer=self.optimizer, model=self.model)

    def manager(self, folder: Path, **options: Any) -> Any:
        """Returns a manager of this checkpoint."""
        return self.adapter.smp.CheckpointManager(self.checkpoint, str(folder), **options)

    def go(self, steps: int) -> list[float]:
        """Trains; returns the losses."""
        losses = []
        for _ in range(steps):
            gradients, loss, _ = self.step(*self.batch)
            means = [each.accumulate() for each in gradients]
            pairs = zip(means, self.model.trainable_variables, strict=True)
            self.optimizer.apply_gradients(pairs)
            losses.append(float(loss.reduce_mean()))
        return losses


@tensorflow_case("smp.CheckpointManager", worlds=("alone",))
def the_manager_is_one_of_tensorflow(adapter: Any) -> None:
    assert issubclass(adapter.smp.CheckpointManager, adapter.tf.train.CheckpointManager)


@tensorflow_case("smp.CheckpointManager", worlds=("alone",))
def what_a_manager_cannot_use_is_refused(adapter: Any) -> None:
    with shared_folder(adapter) as folder:
        with pytest.raises(TypeError):
            adapter.smp.CheckpointManager({"model": adapter.model()}, str(folder))
        for number in (0, -1):
            with pytest.raises(ValueError, match="max_to_keep"):
                Training(adapter).manager(folder, max_to_keep=number)


@tensorflow_case("smp.CheckpointManager.save", "smp.CheckpointManager.restore", worlds=_SOME)
def training_goes_on_from_a_checkpoint(adapter: Any) -> None:
    """Weights and the state of the optimizer come back, so that the losses repeat."""
    with shared_folder(adapter) as folder:
        training = Training(adapter)
        training.go(2)
        manager = training.manager(folder)
        saved = manager.save()
        assert str(folder) in str(saved)
        after = training.go(3)
        assert manager.restore() is not None
        np.testing.assert_allclose(training.go(3), after, rtol=1e-6)


@tensorflow_case(
    "smp.CheckpointManager(directory)",
    "smp.CheckpointManager.save",
    "smp.CheckpointManager",
    worlds=_SOME,
)
def a_checkpoint_is_on_disk_when_save_returns(adapter: Any) -> None:
    """With the manager's state as text, and files of the given name."""
    training = Training(adapter)
    training.go(1)
    for options, prefix in (({}, "ckpt"), ({"checkpoint_name": "mine"}, "mine")):
        with shared_folder(adapter) as folder:
            training.manager(folder, **options).save()
            found = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
            assert any(
                str(path).startswith(prefix) or path.name.startswith(prefix) for path in found
            )
            assert (folder / "checkpoint").read_text().strip()
            adapter.smp.barrier()


def _numbers(folder: Path) -> set[str]:
    """Returns the numbers of the checkpoints in a folder."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return {found[1] for name in names if (found := re.search(r"ckpt-(\d+)", name))}


@tensorflow_case(
    "smp.CheckpointManager(max_to_keep)",
    "smp.CheckpointManager",
    "smp.CheckpointManager.save",
    worlds=("alone", "pipeline"),
)
def old_checkpoints_go_and_the_newest_is_restored(adapter: Any) -> None:
    training = Training(adapter)
    training.go(1)
    for keep, left in ((2, 2), (None, 4)):
        with shared_folder(adapter) as folder:
            manager = training.manager(folder, max_to_keep=keep)
            for _ in range(4):
                training.go(1)
                manager.save()
            adapter.smp.barrier()
            assert len(_numbers(folder)) == left
            after = training.go(1)
            manager.restore()
            np.testing.assert_allclose(training.go(1), after, rtol=1e-6)


@tensorflow_case("smp.CheckpointManager.restore", worlds=("alone", "pipeline"))
def a_folder_without_checkpoints_restores_nothing(adapter: Any) -> None:
    with shared_folder(adapter) as folder:
        training = Training(adapter)
        first = training.go(1)
        assert training.manager(folder).restore() is None
        assert training.go(1)[0] < first[0]


def _resumes(adapter: Any, when: str) -> None:
    """Asserts that a new model goes on from what another one saved."""
    with shared_folder(adapter) as folder:
        training = Training(adapter)
        training.go(2)
        training.manager(folder).save()
        after = training.go(3)
        adapter.reset()
        assert resumed(adapter, folder, when) == pytest.approx(after, rel=1e-6)


def resumed(adapter: Any, folder: Path, when: str) -> list[float]:
    """Restores before or after the first step, or in a hook; returns the losses that follow."""
    training = Training(adapter)
    manager = training.manager(folder)
    if when == "after":
        training.go(1)
    if when == "hook":
        adapter.smp.register_post_partition_hook(manager.restore)
    else:
        manager.restore()
    return training.go(3)


@tensorflow_case("smp.CheckpointManager.restore", worlds=("pipeline",))
def a_new_model_is_restored_after_its_first_step(adapter: Any) -> None:
    _resumes(adapter, "after")


@tensorflow_case("smp.CheckpointManager.restore", worlds=("pipeline",))
def a_new_model_is_restored_before_its_first_step(adapter: Any) -> None:
    _resumes(adapter, "before")


@tensorflow_case(
    "smp.CheckpointManager.restore",
    "smp.register_post_partition_hook",
    worlds=("pipeline",),
    is_quick=False,
)
def a_new_model_is_restored_in_a_hook(adapter: Any) -> None:
    _resumes(adapter, "hook")


def _start(degree: int) -> Any:
    adapter: Any = adapter_of("tensorflow")
    adapter.smp.init(
        {"pipeline_parallel_degree": degree, "microbatches": 4, "communication_timeout": 30}
    )
    return adapter


def save_in_a_job(folder: str) -> list[float]:
    """Trains over two partitions and saves; returns the losses that follow."""
    training = Training(_start(2))
    training.go(2)
    training.manager(Path(folder)).save()
    return training.go(3)


def resume_or_say_why(degree: int, folder: str) -> tuple[list[float], str]:
    """Returns the losses that follow a restore, or what was said against it."""
    adapter = _start(degree)
    try:
        return resumed(adapter, Path(folder), "before"), ""
    except Exception as error:
        return [], str(error)


@tensorflow_case("smp.CheckpointManager.restore", worlds=("new",), starts_jobs=True)
def a_new_job_goes_on_and_another_number_of_partitions_is_refused_or_right(adapter: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = run_ranks(2, save_in_a_job, args=[folder], **quickly(adapter)).results
        same = run_ranks(2, resume_or_say_why, args=[2, folder], **quickly(adapter)).results
        ((losses, said),) = run_ranks(
            1, resume_or_say_why, args=[1, folder], **quickly(adapter, 1)
        ).results
    for (own, refusal), wanted in zip(same, saved, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-6, err_msg=refusal)
    if said:
        assert re.search(r"\b1\b", said), said
        assert re.search(r"\b2\b", said), said
    else:
        np.testing.assert_allclose(losses, saved[0], rtol=1e-5)
