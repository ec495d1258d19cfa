from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smdistributed.modelparallel.common.errors import PartitionError
from smdistributed.modelparallel.common.planning.partitioner import Assignment, Unit, partition


def flat(*children: Unit) -> Unit:
    return Unit("", 0.0, 0.0, 0, children=children)


def row(weights: Sequence[float]) -> Unit:
    return flat(*(Unit(f"u{i}", w, w, i) for i, w in enumerate(weights)))


def partitions(assignment: Assignment) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in range(assignment.num_partitions)]
    for name, index in assignment.units.items():
        found[index].append(name)
    return found


def gpt2(num_layers: int = 12, *, block: float = 7.0, embedding: float = 38.6) -> Unit:
    """Sizes in the proportions of GPT-2, with the embedding tied to the head."""
    tied = frozenset({"wte.weight"})
    blocks = tuple(
        Unit(
            f"transformer.h.{i}",
            0,
            0,
            3 + 4 * i,
            output_bytes=1,
            children=(
                Unit(f"transformer.h.{i}.attn", block / 3, block / 3, 4 + 4 * i),
                Unit(f"transformer.h.{i}.mlp", 2 * block / 3, 2 * block / 3, 5 + 4 * i),
            ),
        )
        for i in range(num_layers)
    )
    end = 4 + 4 * num_layers
    transformer = Unit(
        "transformer",
        0,
        0,
        0,
        children=(
            Unit("transformer.wte", 0, embedding, 0, tied),
            Unit("transformer.wpe", 0, 0.8, 1),
            Unit("transformer.drop", 0.01, 0, 2),
            Unit("transformer.h", 0, 0, 3, children=blocks),
            Unit("transformer.ln_f", 0.01, 0.001, end),
        ),
    )
    return Unit("", 0, 0, 0, children=(transformer, Unit("lm_head", embedding, 0, end + 1, tied)))


def test_equal_units_are_dealt_evenly() -> None:
    assignment = partition(row([1] * 6), 3, 0.5)
    assert partitions(assignment) == [["u0", "u1"], ["u2", "u3"], ["u4", "u5"]]
    assert assignment.compute_shares == assignment.memory_shares == (1 / 3,) * 3
    assert assignment.cost == pytest.approx(1 / 3)
    assert assignment.containers == {"": 0}


@pytest.mark.parametrize(
    ("memory_weight", "expected"),
    [(1.0, [["a"], ["b", "c", "d"]]), (0.0, [["a", "b", "c"], ["d"]])],
)
def test_memory_weight_chooses_what_is_balanced(
    memory_weight: float, expected: list[list[str]]
) -> None:
    root = flat(Unit("a", 1, 3, 0), Unit("b", 1, 1, 1), Unit("c", 1, 1, 2), Unit("d", 3, 1, 3))
    assert partitions(partition(root, 2, memory_weight)) == expected


def test_one_partition_holds_the_whole_model() -> None:
    assert partition(gpt2(), 1, 0.8).units == {"": 0}


def test_only_heavy_units_are_opened() -> None:
    heavy = Unit("heavy", 0, 0, 0, children=(Unit("h0", 4, 4, 0), Unit("h1", 4, 4, 1)))
    light = Unit("light", 0, 0, 2, children=(Unit("l0", 1, 1, 2), Unit("l1", 1, 1, 3)))
    assignment = partition(flat(heavy, light), 2, 0.5)
    assert partitions(assignment) == [["h0"], ["h1", "light"]]
    assert assignment.containers == {"": 0, "heavy": 0}


def test_a_unit_that_is_not_splittable_stays_whole() -> None:
    inner = (Unit("h0", 4, 4, 0), Unit("h1", 4, 4, 1))
    heavy = Unit("heavy", 0, 0, 0, children=inner, splittable=False)
    assert partitions(partition(flat(heavy, Unit("l", 1, 1, 2)), 2, 0.5)) == [["heavy"], ["l"]]


def test_light_units_are_opened_where_partitions_would_stay_empty() -> None:
    pair = Unit("pair", 0, 0, 1, children=(Unit("p0", 1, 1, 1), Unit("p1", 1, 1, 2)))
    assignment = partition(flat(Unit("big", 98, 98, 0), pair), 3, 0.5)
    assert partitions(assignment) == [["big"], ["p0"], ["p1"]]


def test_what_a_split_container_holds_counts_with_its_first_unit() -> None:
    children = (Unit("a", 1, 1, 0), Unit("b", 1, 1, 1), Unit("c", 1, 1, 2))
    assignment = partition(Unit("root", 1, 2, 0, children=children), 2, 0.5)
    assert partitions(assignment) == [["a"], ["b", "c"]]
    assert assignment.containers == {"root": 0}
    assert assignment.memory_shares == (0.6, 0.4)
    assert assignment.compute_shares == (0.5, 0.5)


def test_order_of_execution_decides_not_the_order_of_the_tree() -> None:
    root = flat(Unit("last", 1, 1, 9), Unit("first", 1, 1, 1))
    assert list(partition(root, 2, 0.5).units.items()) == [("first", 0), ("last", 1)]


def test_units_without_parameters_follow_their_producer() -> None:
    root = flat(Unit("a", 1, 1, 0), Unit("relu", 0, 0, 1), Unit("b", 1, 1, 2))
    assert partitions(partition(root, 2, 0.8)) == [["a", "relu"], ["b"]]
    costly = flat(Unit("a", 1, 1, 0), Unit("softmax", 1, 0, 1), Unit("b", 0, 1, 2))
    assert partitions(partition(costly, 2, 0.2)) == [["a"], ["softmax", "b"]]


@pytest.mark.parametrize(
    ("output_bytes", "expected"),
    [
        ([1, 5, 9, 1, 1], [["u0", "u1"], ["u2", "u3", "u4"]]),
        ([1, 9, 5, 1, 1], [["u0", "u1", "u2"], ["u3", "u4"]]),
        ([1, 5, 5, 1, 1], [["u0", "u1"], ["u2", "u3", "u4"]]),
    ],
)
def test_between_equal_balances_fewer_bytes_cross_or_the_cut_is_early(
    output_bytes: list[float], expected: list[list[str]]
) -> None:
    root = flat(*(Unit(f"u{i}", 1, 1, i, output_bytes=b) for i, b in enumerate(output_bytes)))
    assert partitions(partition(root, 2, 0.5)) == expected


def test_below_an_unavoidable_bottleneck_the_rest_is_even() -> None:
    assert partitions(partition(row([8, 1, 1, 1, 1, 1, 1]), 4, 0.5)) == [
        ["u0"],
        ["u1", "u2"],
        ["u3", "u4"],
        ["u5", "u6"],
    ]


def test_tied_gpt2_has_both_ends_on_the_first_partition() -> None:
    assignment = partition(gpt2(), 4, 0.8)
    assert assignment.units["transformer.wte"] == assignment.units["lm_head"] == 0
    assert assignment.units["transformer.drop"] == assignment.units["transformer.wpe"]
    blocks = [assignment.units[f"transformer.h.{i}"] for i in range(12)]
    assert blocks == sorted(blocks)
    assert set(blocks) == {1, 2, 3}
    assert assignment.containers == {"": 0, "transformer": 0, "transformer.h": 1}


def test_a_v_goes_up_the_partitions_and_comes_back() -> None:
    assignment = partition(row([1] * 12), 3, 0.5, v_shaped=True)
    assert partitions(assignment) == [
        ["u0", "u1", "u10", "u11"],
        ["u2", "u3", "u8", "u9"],
        ["u4", "u5", "u6", "u7"],
    ]
    assert assignment.compute_shares == (1 / 3,) * 3


def test_a_v_has_both_ends_of_tied_gpt2_and_blocks_on_the_first_partition() -> None:
    assignment = partition(gpt2(24), 4, 0.2, v_shaped=True)
    assert assignment.units["transformer.wte"] == assignment.units["lm_head"] == 0
    blocks = [part for name, part in assignment.units.items() if ".h." in name]
    middle = blocks.index(3)
    assert blocks[:middle] == sorted(blocks[:middle])
    assert blocks[middle:] == sorted(blocks[middle:], reverse=True)
    assert assignment.cost < 0.3


def test_a_v_opens_units_that_are_heavy_for_a_piece() -> None:
    inner = tuple(Unit(f"p{i}", 1, 1, i) for i in range(4))
    root = flat(Unit("pair", 0, 0, 0, children=inner), Unit("a", 4, 4, 4), Unit("b", 4, 4, 5))
    assert partitions(partition(root, 2, 0.5)) == [["pair"], ["a", "b"]]
    v_shaped = partition(root, 2, 0.5, v_shaped=True)
    assert partitions(v_shaped) == [["p0", "p1", "b"], ["p2", "p3", "a"]]


def blocks(count: int, crossing: float) -> Unit:
    """Blocks of two halves, with so many bytes between these and one between two blocks."""
    halves = [(Unit(f"b{i}.a", 2, 1, 2 * i, output_bytes=crossing), i) for i in range(count)]
    return flat(
        *(
            Unit(
                f"b{i}",
                0,
                0,
                2 * i,
                output_bytes=1,
                children=(half, Unit(f"b{i}.m", 3, 1, 2 * i + 1, output_bytes=1)),
            )
            for half, i in halves
        )
    )


@pytest.mark.parametrize(("crossing", "heaviest"), [(1, 17), (2, 20)])
def test_a_v_opens_units_at_its_cuts_where_no_more_crosses(crossing: int, heaviest: int) -> None:
    # Of 13 whole blocks of 5 one of four ranks would have 4; the others 3.
    assignment = partition(blocks(13, crossing), 4, 0.0, v_shaped=True)
    loads = [round(share * 13 * 5) for share in assignment.compute_shares]
    assert max(loads) == heaviest
    opened = [name for name in assignment.containers if name]
    assert bool(opened) == (crossing == 1)
    for name in opened:
        assert assignment.units[f"{name}.a"] != assignment.units[f"{name}.m"]
    up, back = [assignment.units[f"b{i}"] for i in range(13) if f"b{i}" not in opened], []
    while up and up[-1] != 3:
        back.append(up.pop())
    assert (up, back) == (sorted(up), sorted(back))


@pytest.mark.parametrize(("num_microbatches", "heaviest"), [(None, 2), (2, 0)])
def test_with_few_microbatches_who_begins_first_has_most_to_do(
    num_microbatches: int | None, heaviest: int
) -> None:
    assignment = partition(blocks(13, 2), 4, 0.0, v_shaped=True, num_microbatches=num_microbatches)
    assert assignment.compute_shares.index(max(assignment.compute_shares)) == heaviest


def test_a_v_of_one_rank_is_the_whole_model() -> None:
    assert partition(blocks(3, 1), 1, 0.0, v_shaped=True).compute_shares == (1.0,)


def test_a_v_opens_nothing_for_little() -> None:
    assignment = partition(blocks(16, 1), 4, 0.0, v_shaped=True)
    assert [name for name in assignment.containers if name] == []


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (row([1] * 4), "over 3 ranks has 5 pieces; received a model with 4 parts"),
        (
            flat(*(Unit(f"u{i}", 1, 1, i, pinned=1 if i == 3 else None) for i in range(9))),
            r"places every unit itself; received units pinned to \[1\]",
        ),
    ],
)
def test_what_allows_no_v_is_refused(root: Unit, message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        partition(root, 3, 0.5, v_shaped=True)


def test_a_tied_group_moves_to_its_last_unit_where_that_is_better() -> None:
    tied = frozenset({"w"})
    weights = [1.0, 4, 1, 1, 1, 1]
    units = [Unit(f"u{i}", w, w, i) for i, w in enumerate(weights)]
    units[0] = Unit("u0", 1, 1, 0, tied)
    units[5] = Unit("u5", 1, 1, 5, tied)
    # The tied units weigh 2. With the first, the parts are 6 and 3; with the last, 4 and 5.
    assignment = partition(flat(*units), 2, 0.5)
    assert partitions(assignment) == [["u1"], ["u0", "u2", "u3", "u4", "u5"]]


def test_a_light_unit_is_opened_where_its_tie_makes_a_heavy_group() -> None:
    tied = frozenset({"w"})
    halves = [
        Unit(
            f"half{i}",
            0,
            0,
            3 * i,
            children=(
                Unit(f"half{i}.embed", 1, 1, 3 * i, tied),
                Unit(f"half{i}.body0", 4, 4, 3 * i + 1),
                Unit(f"half{i}.body1", 5, 5, 3 * i + 2),
            ),
        )
        for i in range(2)
    ]
    assignment = partition(flat(*halves), 2, 0.5)
    assert partitions(assignment) == [
        ["half0.embed", "half0.body0", "half0.body1", "half1.embed"],
        ["half1.body0", "half1.body1"],
    ]


def test_pins_are_kept_and_inherited() -> None:
    tower = Unit(
        "tower", 0, 0, 1, pinned=1, children=(Unit("t0", 1, 1, 1), Unit("t1", 1, 1, 2, pinned=0))
    )
    root = flat(Unit("a", 1, 1, 0, pinned=1), tower, Unit("b", 1, 1, 3), Unit("c", 1, 1, 4))
    assignment = partition(root, 2, 0.5)
    assert assignment.units == {"a": 1, "t0": 1, "t1": 0, "b": 0, "c": 1}
    assert assignment.containers["tower"] == 1


def test_a_light_unit_goes_whole_where_a_unit_in_it_is_pinned() -> None:
    tower = Unit("tower", 0, 0, 0, children=(Unit("t0", 1, 1, 0), Unit("t1", 1, 1, 1, pinned=1)))
    assignment = partition(flat(tower, Unit("a", 9, 9, 2), Unit("b", 9, 9, 3)), 2, 0.5)
    assert assignment.units == {"tower": 1, "a": 0, "b": 1}


def test_a_tied_group_goes_where_one_of_it_is_pinned() -> None:
    tied = frozenset({"w"})
    root = flat(Unit("a", 1, 1, 0, tied), Unit("b", 1, 1, 1), Unit("c", 1, 1, 2, tied, pinned=1))
    assert partition(root, 2, 0.5).units == {"a": 1, "b": 0, "c": 1}


def test_a_model_that_is_all_pinned() -> None:
    root = flat(Unit("a", 1, 1, 0, pinned=2), Unit("b", 1, 1, 1, pinned=0))
    assert partition(root, 3, 0.5).units == {"a": 2, "b": 0}
    assert partition(Unit("", 1, 1, 0, pinned=1), 3, 0.5).units == {"": 1}


def test_shared_parameters_pinned_apart_are_refused() -> None:
    tied = frozenset({"w"})
    root = flat(Unit("a", 1, 1, 0, tied, pinned=0), Unit("c", 1, 1, 2, tied, pinned=1))
    with pytest.raises(
        PartitionError, match=r"share 'w' and are pinned apart \('a' on 0, 'c' on 1"
    ):
        partition(root, 2, 0.5)


def test_parameters_that_tie_through_a_third_unit_are_refused_as_well() -> None:
    root = flat(
        Unit("a", 1, 1, 0, frozenset({"v"}), pinned=0),
        Unit("b", 1, 1, 1, frozenset({"v", "w"})),
        Unit("c", 1, 1, 2, frozenset({"w"}), pinned=1),
    )
    with pytest.raises(PartitionError, match=r"share 'v', 'w' and are pinned apart"):
        partition(root, 2, 0.5)


def test_fewer_units_than_partitions_leave_the_last_ones_empty() -> None:
    assert partitions(partition(row([5, 1]), 4, 0.5)) == [["u0"], ["u1"], [], []]


def test_units_without_any_cost_are_dealt_by_number() -> None:
    assert partitions(partition(row([0] * 4), 2, 0.5)) == [["u0", "u1"], ["u2", "u3"]]


@pytest.mark.parametrize(
    ("root", "num_partitions", "memory_weight", "message"),
    [
        (row([1]), 0, 0.5, "at least one partition; received 0"),
        (row([1]), 1, 1.5, "received 1.5"),
        (row([1]), 1, float("nan"), "received nan"),
        (row([1, -1]), 2, 0.5, "'u1' has compute -1"),
        (flat(Unit("a", 1, 1, 0), Unit("a", 1, 1, 1)), 2, 0.5, "'a' twice"),
        (flat(Unit("a", 1, 1, 0, pinned=2)), 2, 0.5, "'a' is pinned to 2"),
        (
            Unit(
                "r",
                0,
                0,
                0,
                children=(Unit("a", 1, 1, 0, pinned=0), Unit("b", 1, 1, 1, pinned=1)),
                splittable=False,
            ),
            2,
            0.5,
            r"'r' holds units pinned to \[0, 1\]",
        ),
    ],
)
def test_what_cannot_be_partitioned_is_refused(
    root: Unit, num_partitions: int, memory_weight: float, message: str
) -> None:
    with pytest.raises(PartitionError, match=message):
        partition(root, num_partitions, memory_weight)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[Unit], int]:
    count = draw(st.integers(1, 7))
    num_partitions = draw(st.integers(2, 4))
    pins = st.one_of(st.none(), st.none(), st.integers(0, num_partitions - 1))
    units = [
        Unit(
            f"u{i}",
            draw(st.integers(0, 5)),
            draw(st.integers(0, 5)),
            i,
            pinned=draw(pins),
            output_bytes=draw(st.integers(0, 3)),
        )
        for i in range(count)
    ]
    return units, num_partitions


Rating = tuple[Fraction, int, Fraction, float]


def rate(units: Sequence[Unit], where: dict[str, int], weight: Fraction) -> Rating:
    """Heaviest part, bad cuts, sum of squares, bytes: the smaller the better."""
    compute = Fraction(sum(unit.compute for unit in units))
    memory = Fraction(sum(unit.memory for unit in units))
    loads: Counter[int] = Counter()
    is_costly = weight * memory or (1 - weight) * compute
    for unit in units:
        share = weight * Fraction(unit.memory) / (memory or 1)
        share += (1 - weight) * Fraction(unit.compute) / (compute or 1)
        loads[where[unit.name]] += share if is_costly else 1  # type: ignore[assignment]
    free = [unit for unit in units if unit.pinned is None]
    starts = [b for a, b in itertools.pairwise(free) if where[a.name] != where[b.name]]
    return (
        Fraction(max(loads.values())),
        sum(not unit.memory for unit in starts),
        Fraction(sum(load * load for load in loads.values())),
        sum(units[units.index(unit) - 1].output_bytes for unit in starts),
    )


def brute_force(units: Sequence[Unit], num_partitions: int, weight: Fraction) -> Rating:
    """The best rating of all contiguous placements."""
    free = [unit for unit in units if unit.pinned is None]
    pinned = {unit.name: unit.pinned for unit in units if unit.pinned is not None}
    unpinned = [part for part in range(num_partitions) if part not in pinned.values()]
    needy = set(unpinned[: len(free)])
    return min(
        rate(units, pinned | dict(zip((unit.name for unit in free), parts, strict=True)), weight)
        for parts in itertools.combinations_with_replacement(range(num_partitions), len(free))
        if needy.issubset(parts)
    )


@settings(max_examples=400, deadline=None)
@given(rows(), st.sampled_from([Fraction(0), Fraction(1, 5), Fraction(4, 5), Fraction(1)]))
def test_no_contiguous_placement_is_better(
    case: tuple[list[Unit], int], memory_weight: Fraction
) -> None:
    units, num_partitions = case
    assignment = partition(flat(*units), num_partitions, float(memory_weight))
    where = dict(assignment.units)
    assert set(where) == {unit.name for unit in units}
    assert all(unit.pinned in (None, where[unit.name]) for unit in units)
    order = [where[unit.name] for unit in units if unit.pinned is None]
    assert order == sorted(order)
    best = brute_force(units, num_partitions, memory_weight)
    assert rate(units, where, memory_weight) == best
    if any(assignment.costs):
        assert assignment.cost == pytest.approx(float(best[0]))
    assert partition(flat(*units), num_partitions, float(memory_weight)) == assignment


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_tied_units_are_together(data: st.DataObject) -> None:
    keys = [frozenset(data.draw(st.lists(st.sampled_from("abc"), max_size=1))) for _ in range(9)]
    units = [
        Unit(f"u{i}", data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5)), i, shared)
        for i, shared in enumerate(keys)
    ]
    halves = (
        Unit("half0", 1, 1, 0, children=tuple(units[:4])),
        Unit("half1", 1, 1, 4, children=tuple(units[4:])),
    )
    assignment = partition(flat(*halves), 3, 0.5)
    holders = {unit.name: unit for unit in (*units, *halves)}
    for key in "abc":
        places = {
            where
            for name, where in assignment.units.items()
            if any(key in unit.shared for unit in (holders[name], *holders[name].children))
        }
        assert len(places) <= 1
    assert sum(assignment.memory_shares) == pytest.approx(1.0)


def test_a_long_flat_graph() -> None:
    weights = [1 + (7 * i) % 11 for i in range(2000)]
    assignment = partition(row(weights), 64, 0.8)
    assert len(assignment.units) == 2000
    assert set(assignment.units.values()) == set(range(64))
    assert assignment.cost <= 1 / 64 + 11 / sum(weights)
