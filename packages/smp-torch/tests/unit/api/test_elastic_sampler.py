from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.common.errors import ConfigError

SIZES = (1, 7, 24, 25)


def samplers(size: int, replicas: int, state: dict[str, int] | None = None, **options: Any) -> Any:
    made = [smp.ElasticSampler(range(size), replicas, rank, **options) for rank in range(replicas)]
    for each in made:
        if state is not None:
            each.load_state_dict(state)
    return made


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_order_is_that_of_torchs_sampler(drop_last: bool) -> None:
    for size, replicas, shuffle in itertools.product(SIZES, (1, 2, 3, 4), (False, True)):
        options: Any = {"shuffle": shuffle, "seed": 5, "drop_last": drop_last}
        for rank, own in enumerate(samplers(size, replicas, **options)):
            theirs = DistributedSampler(range(size), replicas, rank, **options)  # type: ignore[arg-type]
            for epoch in (0, 1):
                own.set_epoch(epoch)
                theirs.set_epoch(epoch)
                assert list(own) == list(theirs)
                assert len(own) == len(theirs)


def test_an_epoch_is_whole_however_often_the_number_of_replicas_changes() -> None:
    draw = random.Random(0)
    for size, trial in itertools.product(SIZES, range(40)):
        (whole,) = samplers(size, 1, seed=trial)
        whole.set_epoch(trial)
        order, state = list(whole), {"epoch": trial, "had": 0}
        had: list[int] = []
        while len(had) < size:
            replicas = draw.choice((1, 2, 3, 4))
            made = samplers(size, replicas, state, seed=trial)
            passes = [iter(each) for each in made]
            for _ in range(draw.randint(1, 4)):
                had += [index for each in passes if (index := next(each, None)) is not None]
            states = [each.state_dict() for each in made]
            state = states[0]
            assert states == [state] * replicas
            assert state["had"] == min(len(had), size)
        # What is given twice are the first ones, where the last are fewer than replicas.
        assert had[:size] == order
        assert len(had) < size + 4
        (after,) = samplers(size, 1, state, seed=trial)
        assert list(after) == []
        assert list(after) == order


def test_another_epoch_begins_at_its_beginning() -> None:
    (sampler,) = samplers(9, 1, {"epoch": 3, "had": 4})
    sampler.set_epoch(3)
    assert len(list(sampler)) == 5
    (sampler,) = samplers(9, 1, {"epoch": 3, "had": 4})
    sampler.set_epoch(4)
    assert sampler.state_dict() == {"epoch": 4, "had": 0}
    assert len(list(sampler)) == 9


def test_the_state_of_another_sampler_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 'epoch' and 'had'; received 'yielded'"):
        samplers(9, 1, {"yielded": 4})


# torchdata 0.11 calls what torch 2.13 deprecates.
@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_with_another_number_of_replicas(workers: int) -> None:
    package: Any = pytest.importorskip("torchdata.stateful_dataloader")
    global_batch, size = 12, 60

    def loaders(replicas: int, state: Any) -> list[Any]:
        made = []
        for sampler in samplers(size, replicas, seed=3):
            batch = global_batch // replicas
            loader = package.StatefulDataLoader(
                range(size), batch_size=batch, sampler=sampler, num_workers=workers
            )
            if state is not None:
                loader.load_state_dict(state)
            made.append(loader)
        return made

    (whole,) = samplers(size, 1, seed=3)
    order, state, found = list(whole), None, []
    for replicas in (4, 3, 1, 2):
        made = loaders(replicas, state)
        passes = [iter(each) for each in made]
        for _ in range(1 if replicas != 2 else 2):
            found.append(sorted(i for each in passes for i in next(each).tolist()))
        state = made[0].state_dict()
    assert found == [sorted(order[i : i + 12]) for i in range(0, size, 12)]
