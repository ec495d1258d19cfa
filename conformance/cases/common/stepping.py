"""Step functions: how arguments are cut and results come back."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest

from conformance.adapters.base import WIDTH, Adapter
from conformance.registry import case

_WITH_PIPELINE = ("alone", "pipeline", "both")


def _call(model: Any, x: Any) -> Any:
    return model(x)


@case("smp.step", "common.first_call", worlds=_WITH_PIPELINE)
def a_step_runs_its_body_once_a_microbatch(adapter: Adapter) -> None:
    x = adapter.batch(8)
    output = adapter.smp.step(_call)(adapter.model(), adapter.tensor(x))
    assert len(output.outputs) == adapter.config.microbatches
    for part, got in zip(np.split(x, adapter.config.microbatches), output.outputs, strict=True):
        np.testing.assert_allclose(adapter.array(got), adapter.reference(part), atol=1e-6)


@case("smp.step", worlds=("alone", "pipeline"))
def the_decorator_has_three_forms(adapter: Adapter) -> None:
    step, x = adapter.smp.step, adapter.batch(4)
    for decorate in (step, step(), step(non_split_inputs=[])):
        output = decorate(_call)(adapter.model(), adapter.tensor(x))
        np.testing.assert_allclose(adapter.array(output.concat()), adapter.reference(x), atol=1e-6)


@case("smp.step(non_split_inputs)", "smp.step", worlds=("pipeline",))
def inputs_that_are_not_split_come_whole(adapter: Adapter) -> None:
    def body(model: Any, x: Any, scale: Any) -> Any:
        return model(x) * scale

    x, scale = adapter.batch(8), np.arange(WIDTH, dtype=np.float32)
    step = adapter.smp.step(non_split_inputs=["scale"])(body)
    output = step(adapter.model(), adapter.tensor(x), adapter.tensor(scale))
    np.testing.assert_allclose(
        adapter.array(output.concat()), adapter.reference(x) * scale, atol=1e-5
    )


@case("smp.step(input_split_axes)", "smp.step", worlds=("pipeline",))
def an_input_can_be_split_along_another_axis(adapter: Adapter) -> None:
    def body(model: Any, x: Any, across: Any) -> Any:
        assert tuple(across.shape) == (2, 8 // adapter.config.microbatches)
        return model(x) + across[0, 0] + across[1, 1]

    x, across = adapter.batch(8), np.arange(2 * 8, dtype=np.float32).reshape(2, 8)
    step = adapter.smp.step(input_split_axes={"across": 1})(body)
    output = step(adapter.model(), adapter.tensor(x), adapter.tensor(across))
    parts = (
        np.split(each, adapter.config.microbatches, axis) for each, axis in ((x, 0), (across, 1))
    )
    for part, piece, got in zip(*parts, output.outputs, strict=True):
        expected = adapter.reference(part) + piece[0, 0] + piece[1, 1]
        np.testing.assert_allclose(adapter.array(got), expected, atol=1e-5)


@case("smp.step", worlds=("pipeline",))
def keyword_arguments_are_matched_by_name(adapter: Adapter) -> None:
    def body(model: Any, x: Any, *, first: Any, second: float = 2.0) -> Any:
        return model(x) * second + first

    x, first = adapter.batch(8), adapter.batch(8, seed=1)
    step = adapter.smp.step(body)
    output = step(adapter.model(), x=adapter.tensor(x), first=adapter.tensor(first))
    expected = adapter.reference(x) * 2 + first
    np.testing.assert_allclose(adapter.array(output.concat()), expected, atol=1e-5)


@case("smp.step", "common.in_use.step_arguments", "compat.step_forms_and_results")
def other_arguments_pass_as_they_are(adapter: Adapter) -> None:
    def body(model: Any, x: Any, options: argparse.Namespace, nothing: None, word: str) -> Any:
        assert nothing is None
        assert word == "word"
        return model(x) * options.scale

    x = adapter.batch(8)
    step = adapter.smp.step(body)
    options = argparse.Namespace(scale=3.0)
    output = step(adapter.model(), adapter.tensor(x), options, None, "word")
    expected = adapter.reference(x) * 3
    np.testing.assert_allclose(adapter.array(output.concat()), expected, atol=1e-5)


@case("smp.step", worlds=("alone",))
def what_is_no_function_cannot_be_a_step(adapter: Adapter) -> None:
    def generator(model: Any, x: Any) -> Any:
        yield model(x)

    for wrong in (3, "train", generator):
        with pytest.raises((TypeError, ValueError), match="step function must"):
            adapter.smp.step()(wrong)
    with pytest.raises((TypeError, ValueError), match="step function must"):
        adapter.smp.step(generator)


@case("smp.step", worlds=("alone",))
def options_of_a_step_are_those_of_its_definition(adapter: Adapter) -> None:
    axes, whole = {"across": 1}, ["whole"]

    def body(model: Any, x: Any, across: Any, whole: Any) -> Any:
        return adapter.mean(across), adapter.mean(whole), model(x)

    step = adapter.smp.step(input_split_axes=axes, non_split_inputs=whole)(body)
    axes.clear()
    whole.clear()
    x = adapter.batch(8)
    across = np.arange(16, dtype=np.float32).reshape(2, 8)
    means, wholes, _ = step(
        adapter.model(), adapter.tensor(x), adapter.tensor(across), adapter.tensor(across)
    )
    pieces = np.split(across, adapter.config.microbatches, axis=1)
    for piece, got, of_all in zip(pieces, means.outputs, wholes.outputs, strict=True):
        np.testing.assert_allclose(adapter.array(got), piece.mean())
        np.testing.assert_allclose(adapter.array(of_all), across.mean())


@case("smp.step")
def tensors_in_containers_are_split(adapter: Adapter) -> None:
    def body(model: Any, data: dict[str, Any], pair: tuple[Any, list[Any]]) -> Any:
        return model(data["x"]) + pair[0] + pair[1][0]

    x, y, z = (adapter.batch(8, seed=seed) for seed in range(3))
    step = adapter.smp.step(body)
    tensors = [adapter.tensor(each) for each in (x, y, z)]
    output = step(adapter.model(), {"x": tensors[0]}, (tensors[1], [tensors[2]]))
    expected = adapter.reference(x) + y + z
    np.testing.assert_allclose(adapter.array(output.concat()), expected, atol=1e-5)


@case("smp.step")
def results_keep_their_structure(adapter: Adapter) -> None:
    def body(model: Any, x: Any) -> Any:
        out = model(x)
        return {"out": out, "more": [out * 2, (out + 1,)]}

    x = adapter.batch(8)
    output = adapter.smp.step(body)(adapter.model(), adapter.tensor(x))
    kind = adapter.smp.StepOutput
    assert isinstance(output["out"], kind)
    assert isinstance(output["more"][0], kind)
    assert isinstance(output["more"][1], tuple)
    got = adapter.array(output["more"][1][0].concat())
    np.testing.assert_allclose(got, adapter.reference(x) + 1, atol=1e-6)


@case("smp.step", "compat.step_forms_and_results", worlds=("alone", "pipeline"))
def numbers_become_a_list_with_one_entry_a_microbatch(adapter: Adapter) -> None:
    def body(model: Any, x: Any) -> Any:
        return model(x), 2.5, "same"

    x = adapter.batch(8)
    _, numbers, word = adapter.smp.step(body)(adapter.model(), adapter.tensor(x))
    assert numbers == [2.5] * adapter.config.microbatches
    assert word == "same"


@case("smp.step", "config.C07", worlds=("alone", "pipeline"))
def a_batch_that_does_not_divide_is_cut_unevenly(adapter: Adapter) -> None:
    x = adapter.batch(11)
    output = adapter.smp.step(_call)(adapter.model(), adapter.tensor(x))
    sizes = [len(adapter.array(each)) for each in output.outputs]
    assert sum(sizes) == 11
    assert max(sizes) - min(sizes) == 1
    np.testing.assert_allclose(adapter.array(output.concat()), adapter.reference(x), atol=1e-6)


@case("smp.step", "config.C07", worlds=("alone", "pipeline"))
def batches_that_cannot_be_cut_are_refused(adapter: Adapter) -> None:
    def body(model: Any, x: Any, y: Any) -> Any:
        return model(x) + y

    step, model = adapter.smp.step(body), adapter.model()
    for first, second in ((0, 0), (8, 4)):
        pair = (adapter.tensor(adapter.batch(size)) for size in (first, second))
        with pytest.raises(ValueError, match=r"batch|microbatches|size"):
            step(model, *pair)


@case("smp.step", "config.C07", worlds=("alone", "pipeline"))
def a_batch_smaller_than_microbatches_is_refused_or_right(adapter: Adapter) -> None:
    x = adapter.batch(1)
    step, model = adapter.smp.step(_call), adapter.model()
    try:
        output = step(model, adapter.tensor(x))
    except ValueError as error:
        if "microbatches" not in str(error):
            pytest.fail(f"the error does not tell of microbatches: {error}")
        return
    np.testing.assert_allclose(adapter.array(output.concat()), adapter.reference(x), atol=1e-6)
    assert len(output.outputs) == len(x)


@case("smp.step", worlds=("alone",))
def names_that_are_not_arguments_are_refused_at_once(adapter: Adapter) -> None:
    for options in ({"non_split_inputs": ["y"]}, {"input_split_axes": {"y": 1}}):
        with pytest.raises(ValueError, match="y"):
            adapter.smp.step(**options)(_call)


@case("smp.step", worlds=("alone",))
def an_axis_that_is_not_there_is_refused(adapter: Adapter) -> None:
    step = adapter.smp.step(input_split_axes={"x": 5})(_call)
    with pytest.raises(ValueError, match=r"x.*axis 5|axis 5.*x"):
        step(adapter.model(), adapter.tensor(adapter.batch(8)))


@case("smp.step", worlds=("alone", "pipeline"))
def steps_are_not_nested(adapter: Adapter) -> None:
    model = adapter.model()
    inner = adapter.smp.step(_call)

    def body(model: Any, x: Any) -> Any:
        return inner(model, x)

    with pytest.raises(Exception, match="inside another step"):
        adapter.smp.step(body)(model, adapter.tensor(adapter.batch(8)))


class Cut:
    """Knows how it is split."""

    def __init__(self, numbers: list[float]) -> None:
        self.numbers = numbers

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Cut:
        """Returns every ``num_mb``-th number, from the ``mb``-th on."""
        assert axis == 0
        return Cut(self.numbers[mb::num_mb])


@case("smp_slice", worlds=("alone", "pipeline"))
def objects_that_can_split_themselves_are_asked(adapter: Adapter) -> None:
    def body(model: Any, x: Any, cut: Cut) -> Any:
        return model(x) + sum(cut.numbers)

    x, numbers = adapter.batch(8), [float(number) for number in range(8)]
    output = adapter.smp.step(body)(adapter.model(), adapter.tensor(x), Cut(numbers))
    microbatches = adapter.config.microbatches
    parts = np.split(x, microbatches)
    for m, (part, got) in enumerate(zip(parts, output.outputs, strict=True)):
        expected = adapter.reference(part) + sum(numbers[m::microbatches])
        np.testing.assert_allclose(adapter.array(got), expected, atol=1e-5)


class Broken:
    """Fails to split itself."""

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> Any:
        """Raises."""
        raise KeyError("lost")


@case("smp_slice", worlds=("alone",))
def an_error_of_smp_slice_names_the_argument(adapter: Adapter) -> None:
    def body(model: Any, x: Any, thing: Any) -> Any:
        return model(x)

    with pytest.raises(KeyError) as error:
        adapter.smp.step(body)(adapter.model(), adapter.tensor(adapter.batch(8)), Broken())
    told = [str(error.value), *getattr(error.value, "__notes__", [])]
    assert any("thing" in each for each in told), told


@case("common.model_output_everywhere", worlds=("pipeline", "both", "manual"))
def every_rank_of_a_pipeline_gets_the_outputs(adapter: Adapter) -> None:
    smp, x = adapter.smp, adapter.batch(8)
    output = adapter.array(smp.step(_call)(adapter.model(), adapter.tensor(x)).concat())
    np.testing.assert_allclose(output, adapter.reference(x), atol=1e-6)
    for other in smp.allgather(output, smp.PP_GROUP):
        assert (other == output).all()


@case("smp.step", "common.data_consistency", worlds=("both",))
def replicas_have_examples_of_their_own(adapter: Adapter) -> None:
    smp = adapter.smp
    x = adapter.batch(8, seed=smp.dp_rank())
    output = smp.step(_call)(adapter.model(), adapter.tensor(x))
    np.testing.assert_allclose(adapter.array(output.concat()), adapter.reference(x), atol=1e-6)


# StepOutput


def _outputs(adapter: Adapter, size: int = 8) -> tuple[Any, list[Any]]:
    """Returns a StepOutput, and what each microbatch must hold."""
    x = adapter.batch(size)
    output = adapter.smp.step(_call)(adapter.model(), adapter.tensor(x))
    return output, [adapter.reference(part) for part in np.split(x, adapter.config.microbatches)]


@case("StepOutput", "StepOutput.outputs", worlds=("alone", "pipeline"))
def outputs_are_those_of_the_microbatches_in_order(adapter: Adapter) -> None:
    output, expected = _outputs(adapter)
    assert isinstance(output, adapter.smp.StepOutput)
    assert all(adapter.is_tensor(each) for each in output.outputs)
    for got, want in zip(output.outputs, expected, strict=True):
        np.testing.assert_allclose(adapter.array(got), want, atol=1e-6)


@case("StepOutput.reduce_mean", worlds=("alone", "pipeline"))
def reduce_mean_averages_over_microbatches(adapter: Adapter) -> None:
    output, expected = _outputs(adapter)
    got = adapter.array(output.reduce_mean())
    np.testing.assert_allclose(got, np.mean(expected, axis=0), atol=1e-6)


@case("StepOutput.reduce_mean", "StepOutput.reduce_sum", "StepOutput.stack", worlds=("new",))
def results_of_one_microbatch_are_that_microbatch(adapter: Adapter) -> None:
    adapter.smp.init({"pipeline_parallel_degree": 1, "microbatches": 1})
    x = adapter.batch(4)
    output = adapter.smp.step(_call)(adapter.model(), adapter.tensor(x))
    wanted = adapter.reference(x)
    for reduce in (output.reduce_mean, output.reduce_sum, output.concat):
        np.testing.assert_allclose(adapter.array(reduce()), wanted, atol=1e-6)
    np.testing.assert_allclose(adapter.array(output.stack()), wanted[None], atol=1e-6)


@case("StepOutput.reduce_mean", "config.C07", worlds=("alone", "pipeline"))
def reduce_mean_of_losses_is_that_of_the_batch(adapter: Adapter) -> None:
    x = adapter.batch(11)  # 3, 3, 3 and 2 examples, or 6 and 5

    def body(model: Any, x: Any) -> Any:
        return adapter.mean(model(x))

    output = adapter.smp.step(body)(adapter.model(), adapter.tensor(x))
    got = adapter.array(output.reduce_mean())
    np.testing.assert_allclose(got, adapter.reference(x).mean(), atol=1e-6)


@case("StepOutput.reduce_sum", worlds=("alone", "pipeline"))
def reduce_sum_adds_over_microbatches(adapter: Adapter) -> None:
    output, expected = _outputs(adapter)
    got = adapter.array(output.reduce_sum())
    np.testing.assert_allclose(got, np.sum(expected, axis=0), atol=1e-5)


@case("StepOutput.concat", worlds=("alone", "pipeline"))
def concat_restores_the_batch(adapter: Adapter) -> None:
    output, expected = _outputs(adapter)
    np.testing.assert_allclose(adapter.array(output.concat()), np.concatenate(expected), atol=1e-6)


@case("StepOutput.stack", worlds=("alone", "pipeline"))
def stack_has_a_new_leading_axis(adapter: Adapter) -> None:
    output, expected = _outputs(adapter)
    np.testing.assert_allclose(adapter.array(output.stack()), np.stack(expected), atol=1e-6)


@case("StepOutput.merge", worlds=("pipeline",))
def merge_is_concat(adapter: Adapter) -> None:
    output, expected = _outputs(adapter)
    np.testing.assert_allclose(adapter.array(output.merge()), np.concatenate(expected), atol=1e-6)


@case(
    "StepOutput.accumulate(method)",
    "StepOutput.accumulate",
    worlds=("pipeline",),
    frameworks=("tensorflow",),
)
def accumulate_is_the_mean_in_three_ways(adapter: Adapter) -> None:
    output, expected = _outputs(adapter)
    for method in ("variable", "add_n", "accumulate_n"):
        got = adapter.array(output.accumulate(method))
        np.testing.assert_allclose(got, np.mean(expected, axis=0), atol=1e-6)
    with pytest.raises(ValueError, match="add_n"):
        output.accumulate("other")


@case("StepOutput.reduce_mean", "StepOutput.reduce_sum", worlds=("alone",))
def outputs_of_several_shapes_are_not_reduced(adapter: Adapter) -> None:
    x = adapter.batch(11)
    output = adapter.smp.step(_call)(adapter.model(), adapter.tensor(x))
    for reduce in (output.reduce_mean, output.reduce_sum):
        with pytest.raises(Exception, match="shape"):
            reduce()


@case("StepOutput.concat", worlds=("pipeline",))
def scalars_are_stacked_not_concatenated(adapter: Adapter) -> None:
    def body(model: Any, x: Any) -> Any:
        return adapter.mean(model(x))

    output = adapter.smp.step(body)(adapter.model(), adapter.tensor(adapter.batch(8)))
    with pytest.raises(Exception, match="stack"):
        output.concat()
    assert adapter.array(output.stack()).shape == (adapter.config.microbatches,)
