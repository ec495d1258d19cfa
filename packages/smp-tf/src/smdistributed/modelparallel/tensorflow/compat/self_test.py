"""Says whether the installed TensorFlow still has what is used of it."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections import deque
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from smdistributed.modelparallel.tensorflow.compat import (
    autograph,
    executors,
    functions,
    graphs,
    keras,
    resources,
)
from smdistributed.modelparallel.tensorflow.compat.gradients import (
    is_recorded,
    is_vectorizing,
    present_sources,
    requests_noted,
    unrecorded,
    watched,
    with_gradient,
)
from smdistributed.modelparallel.tensorflow.compat.initial import InitialValue, lifted
from smdistributed.modelparallel.tensorflow.compat.isolation import apart
from smdistributed.modelparallel.tensorflow.compat.operations import (
    leaves,
    operations_noted,
    unnoted,
)
from smdistributed.modelparallel.tensorflow.compat.optimizers import whole_model
from smdistributed.modelparallel.tensorflow.compat.processes import surviving_calls
from smdistributed.modelparallel.tensorflow.compat.variables import (
    checked_access,
    empty_variable,
    free,
    number,
)


def self_test() -> None:
    """Uses what there is in this folder once.

    Raises:
        Exception: the installed TensorFlow lacks something, or it works differently.
    """
    _test_graphs()
    _test_isolation()
    _test_references()
    _test_initial_values()
    _test_resources()
    _test_optimizers()
    _test_surviving_calls()
    _test_conversion()
    _test_access()
    _test_calls_of_layers()
    _test_sources()
    _test_operations()
    _test_functions()


def _test_isolation() -> None:
    """A tape inside records, one outside does not, and Keras's settings reach the function."""
    before = tf.keras.mixed_precision.global_policy().name
    other = "float64" if before == "float32" else "float32"

    def inside() -> tuple[Any, str]:
        assert tf.executing_eagerly()
        x = tf.constant(3.0)
        with tf.GradientTape() as own:
            own.watch(x)
            y = x * x
        return own.gradient(y, x), tf.keras.mixed_precision.global_policy().name

    tf.keras.mixed_precision.set_global_policy(other)
    try:
        with tf.GradientTape() as tape, tf.Graph().as_default():
            assert is_recorded(tf.constant(1.0)) is False
            gradient, policy = apart(inside)
    finally:
        tf.keras.mixed_precision.set_global_policy(before)
    assert (float(gradient), policy) == (6.0, other)
    assert not tape.watched_variables()
    assert is_recorded(tf.constant(1.0)), "tf.gradients asks without a tape"


def _test_references() -> None:
    variable = tf.Variable(1.0)
    number(variable, 7)
    assert hash(variable.ref()) == 7
    assert variable.ref() == variable.ref()
    assert variable.ref().deref() is variable


def _test_resources() -> None:
    """A loop that only reads is no writer, and what reads later waits for what a pass changed."""
    variable = tf.Variable(1.0)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def run() -> Any:
        graph = tf.compat.v1.get_default_graph()

        def loop(body: Any) -> Any:
            tf.while_loop(lambda n: n < 3.0, lambda n: [body(n)], [tf.constant(0.0)])
            return next(op for op in graph.get_operations()[::-1] if op.type == "While")

        reading = loop(lambda n: n + variable)
        writing = loop(lambda n: n + variable.assign_add(1.0))
        handle = graphs.capture(graph, variable.handle)
        assert not resources.writes(reading, handle)
        assert resources.writes(writing, handle)
        assert resources.origin(graph, handle) is variable.handle
        assert id(handle) in resources.written([writing])
        early, five = variable.read_value(), tf.constant(5.0)
        with tf.control_dependencies(resources.before([], [handle])):
            # As a pass does it: nothing orders it but what it is told to wait for.
            own = tf.raw_ops.AssignAddVariableOp(resource=handle, value=five)
        graphs.keep(graph, [own])
        (wait,) = own.control_inputs
        resources.after(own, [], [handle])
        waiting.append((wait.name, early.op.inputs[0].op.name))
        return early, variable.read_value()

    waiting: list[tuple[str, str]] = []
    assert [float(each) for each in run()] == [3.0, 8.0]
    (names,) = waiting
    before, early = map(run.get_concrete_function().graph.get_operation_by_name, names)
    assert early in before.control_inputs, "a pass may change what is still to be read"


def _test_initial_values() -> None:
    """Noted operations draw what eager ones draw, one after the other."""

    def draw() -> Any:
        return tf.random.normal([2]) + tf.random.uniform([2])

    with tf.init_scope():
        before = context.global_seed()
    tf.random.set_seed(5)
    expected = [draw().numpy().tolist() for _ in range(2)]
    tf.random.set_seed(5)
    noted = [InitialValue(draw, None) for _ in range(2)]
    assert [each.value().numpy().tolist() for each in reversed(noted)] == expected[::-1]
    with tf.Graph().as_default():
        computed = InitialValue(lifted(tf.ones([2]) * 3.0), None)
    assert computed.value().numpy().tolist() == [3.0, 3.0]
    if before is not None:
        tf.random.set_seed(before)


def _signed(x: Any) -> Any:
    return 1.0 if x > 0.0 else -1.0


def _test_conversion() -> None:
    """AutoGraph leaves our code as it is, and converts what it is asked to."""
    autograph.leave_unconverted("smdistributed")
    autograph.leave_unconverted("smdistributed")
    try:
        tf.function(lambda x: _signed(x))(tf.constant(2.0))
    except tf.errors.OperatorNotAllowedInGraphError:
        pass
    else:
        raise AssertionError("AutoGraph converts the code of this package")
    assert float(tf.function(autograph.converted(_signed), autograph=False)(2.0)) == 1.0


def _test_access() -> None:
    """Reads, writes, and checkpoints of variables are seen, within; without, they are not."""
    variable, seen = tf.Variable(1.0), []

    def note(kind: str) -> Any:
        def noted(each: Any, *_: Any) -> bool:
            assert each is variable
            seen.append(kind)
            return False

        return noted

    def use() -> set[str]:
        seen.clear()
        variable.assign(float(variable) + 1.0)
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(one=variable).write(f"{folder}/one")
            tf.train.Checkpoint(one=variable).read(path).assert_consumed()
        return set(seen)

    def is_here(each: Any) -> bool:
        note("access")(each)
        return not absent

    absent: list[Any] = []
    checked = checked_access(
        is_here,
        lambda _: tf.constant(5.0),
        lambda _: contextlib.nullcontext(),
        note("saved"),
        note("restored"),
    )
    with checked:
        assert use() == {"access", "saved", "restored"}
        absent.append(variable)
        with tf.GradientTape() as tape:
            product = variable * 2.0
        gradient = tape.gradient(product, variable)
        variable.assign(7.0)
    found = float(product), float(gradient), float(variable)
    assert found == (10.0, 2.0, 2.0), found
    assert not use()


def _test_calls_of_layers() -> None:
    """Calls of layers go through what is given, within; without, they do not."""
    layer, seen = tf.keras.layers.Dense(1), []

    def called(one: Any, call: Any) -> Any:
        seen.append(one)
        return call()

    with keras.calls_of_layers(called):
        layer(tf.ones([1, 1]))
    layer(tf.ones([1, 1]))
    assert seen == [layer]


def _test_sources() -> None:
    """A gradient of ours knows what is asked for, of a tape and of ``tf.gradients``, and how."""
    seen: list[Any] = []
    noted: list[bool] = []
    variable = tf.Variable(1.0)

    def gradient(dy: Any) -> list[Any]:
        seen.append(present_sources())
        return [dy]

    def note(one: Any) -> Any:
        noted.append(is_vectorizing())
        return one

    def run(x: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = with_gradient([x], gradient, "SmpSelfTest")[0]
        tape.gradient(y, [x])
        tf.gradients(y, x)
        assert [each[0] is x for each in seen] == [True, True]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            y = with_gradient([watched(tf.identity(x))], gradient, "SmpSelfTest")[0]
        assert tape.gradient(y, [variable.handle]) == [None]
        assert tf.gradients(y, [x * 2.0]) == [None]
        assert len(seen) == 4
        tf.vectorized_map(note, tf.ones([2]))
        assert any(noted)
        return []

    with requests_noted():
        tf.function(run, autograph=False)(tf.constant(1.0))
    assert not present_sources()
    assert not is_vectorizing()


def _test_functions() -> None:
    """A loop is made anew with a key as one argument more, which it hands on."""
    source = tf.function(
        lambda n: tf.while_loop(lambda n: n < 3.0, lambda n: [n + 1.0], [n]), autograph=False
    ).get_concrete_function(tf.TensorSpec([]))
    (loop,) = (op for op in source.graph.get_operations() if functions.takes_more(op.node_def))
    made = {}
    for name in functions.called(loop.node_def):
        body = functions.graph_of(source.graph, name)
        with body.as_default():
            key = tf.compat.v1.placeholder(tf.int64, [2])
            is_body = name == functions.body_of_loop(loop.node_def)
            outputs = [*body.outputs, key + 1] if is_body else body.outputs
        made[name] = graphs.function_of(body, [*body.inputs, key], outputs, [], {})

    def run(*operands: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        *inputs, key = operands
        return functions.call_with_more(graph, loop, inputs, key, [], made, ()).outputs

    inputs = [tf.constant(0, each.dtype) for each in loop.inputs]
    inputs[0] = tf.constant(10, inputs[0].dtype)  # most turns, or so
    *_, key = tf.function(run, autograph=False)(*inputs, tf.constant([5, 7], tf.int64))
    assert key.numpy().tolist() == [8, 10], key


def _test_optimizers() -> None:
    """Optimizers ask for the norm and the overflows of all processes, within; without, they do not.

    They update what is here, and know the variables that they train; those that they keep for them
    know these.
    """
    asked: list[str] = []
    trained = (tf.keras.Variable if keras.IS_KERAS_3 else tf.Variable)([1.0])

    def norm(norm_of: Any, gradients: Any, variables: Any) -> Any:
        assert [keras.variable_of(each) for each in variables] == [keras.variable_of(trained)]
        own = norm_of(gradients)
        asked.append(f"norm {float(own)}")
        return 8.0 * own

    def is_finite(own: Any) -> Any:
        asked.append(f"finite {bool(own)}")
        return tf.constant(False)

    def after(optimizer: Any) -> float:
        trained.assign([1.0])
        optimizer.apply_gradients([(tf.constant([2.0]), trained)])
        return float(keras.variable_of(trained)[0])

    def is_elsewhere(variable: Any) -> bool:
        return variable is other

    def note(slot: Any, reference: Any) -> None:
        kept.append(keras.variable_of(slot))

    def check(gradients: Any, variables: Any) -> None:
        checked.append((len(gradients), len(variables)))

    checked: list[tuple[int, int]] = []
    kept: list[Any] = []
    other = type(trained)([1.0])
    with whole_model(norm, is_finite, is_elsewhere, note, list, check):
        unused = tf.keras.optimizers.SGD(1.0, momentum=0.5)
        unused.apply_gradients([(tf.constant([2.0]), other)])
        assert int(tf.convert_to_tensor(unused.iterations)) == 1
        assert float(keras.variable_of(other)[0]) == 1.0
        (slot,) = kept
        assert not bool(tf.raw_ops.VarIsInitializedOp(resource=slot.handle))
        for kind in keras.optimizer_kinds("SGD"):
            assert after(kind(1.0, global_clipnorm=4.0)) == 0.5
        assert checked[-1] == (1, 1)
        scaling = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(1.0))
        assert after(scaling) == 1.0
        adam = tf.keras.optimizers.Adam(0.1)
        keras.build_optimizer(adam, [trained])
        for slots in keras.optimizer_slots(adam).values():
            (slot,) = slots.values()
            assert keras.variable_of(slot)._smp_slot_of is keras.variable_of(trained)
        averaging = tf.keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
        assert after(averaging) == -1.0
        averaging.apply_gradients([(tf.constant([2.0]), trained)])
        averaging.finalize_variable_values([trained])
        assert float(keras.variable_of(trained)[0]) > -3.0
    norms = ["norm 2.0"] * len(keras.optimizer_kinds("SGD"))
    assert asked == [*norms, "finite True"], asked
    assert after(tf.keras.optimizers.SGD(1.0, global_clipnorm=1.0)) == 0.0
    assert asked == [*norms, "finite True"], asked


class _Doubling:
    """Doubles what is added, and what Python is told; notes what it sees."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def before(self, kind: str, args: Any) -> Any:
        if kind != "AddV2":
            return args, None
        with unnoted():
            return [tf.identity(args[0]) * 2.0, *args[1:]], kind

    def after(self, kind: str, known: Any, results: Any, again: Any) -> None:
        assert known in (None, kind)
        if again is not None and known:
            with unnoted():
                assert float(again.make([tf.constant(1.0), tf.constant(2.0)])) == 3.0
        if known:
            self.seen.append(f"{kind} {len(results)}")

    def call(self, graph: Any, args: Any) -> Any:
        return args, len(graph.inputs)

    def called(self, graph: Any, known: Any, results: Any) -> None:
        assert len(graph.outputs) == len(results)
        self.seen.append(f"called with {known}")

    def differentiated(self, sources: Any, gradients: Any, reached: Any, watched: Any) -> Any:
        assert not reached
        assert watched is None or not watched
        self.seen.append(f"gradients {len(sources)}")
        return [3.0 * each for each in gradients]

    def is_owned(self, tensor: Any) -> bool:
        return bool(tensor.dtype == tf.float32)

    def numbers(self, tensor: Any) -> Any:
        with unnoted():
            return 2.0 * tensor._numpy()

    def packed(self, values: Any) -> Any:
        self.seen.append(f"packed {len(values)}")
        return [*values, tf.constant(0.0)], "Pack"

    def assigned(self, variable: Any, value: Any) -> Any:
        return value + 0.5


def _test_operations() -> None:
    """Operations are seen, eagerly and in graphs, and get other arguments; so are calls and reads.

    NumPy has no way past that.
    """
    follower, one, three = _Doubling(), tf.constant(1.0), tf.constant(3)
    variable, few, kinds = tf.Variable(0.0), (one, three), list[str]()

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def added(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = x + 1.0
        return total, tape.gradient(total, x)

    with operations_noted(follower):
        total = one + 1.0
        inside, gradient = added(one)
        taken = tf.function(lambda: kinds.extend(tf.identity(t).op.inputs[0].op.type for t in few))
        taken.get_concrete_function()
        assert kinds == ["Placeholder", "Const"]
        packed = tf.constant([1.0, 2.0])
        variable.assign(1.0)
        with unnoted():
            unseen = one + 1.0
            assert float(unseen) == 2.0
        assert float(unseen) == np.sum(unseen) == np.asarray(unseen) == 4.0
        assert memoryview(tf.constant(3)).nbytes == 4
    assert float(np.asarray(unseen)) == float(unseen) == 2.0
    assert memoryview(unseen).nbytes == 4
    assert packed.shape == (3,)
    found = (float(total), float(inside), float(gradient), float(variable))
    assert found == (3.0, 3.0, 6.0, 1.5), found
    seen = ["AddV2 1", "AddV2 1", "gradients 1", "called with 1", "packed 2", "Pack 1"]
    assert follower.seen == seen, follower.seen
    assert (leaves("StringFormat"), leaves("Assert"), leaves("EagerPyFunc")) == (True,) * 3
    assert not leaves("AddV2")
    assert not leaves("AssignVariableOp")


def _test_surviving_calls() -> None:
    """The list of what is to be cancelled is ours, and the operations of a call use it."""
    queue = tf.queue.FIFOQueue(1, [tf.float32])
    kept: deque[Any] = deque(maxlen=2)
    failures: list[Any] = []
    wait = tf.function(queue.dequeue, autograph=False)
    wait.get_concrete_function()

    def run() -> None:
        try:
            wait()
        except tf.errors.CancelledError as error:
            failures.append(error)

    with surviving_calls(kept):
        thread = threading.Thread(target=run)
        thread.start()
        while not kept:
            time.sleep(0.01)
        # A call that has yet to begin is cancelled as well.
        kept[0].start_cancel()
        thread.join(timeout=10.0)
        assert failures, "TensorFlow does not use the list that it was given"


def _test_graphs() -> None:
    """Traces, copies and calls a function that reads a variable without memory."""
    made: list[Any] = []

    def creator(next_creator: Any, **arguments: Any) -> Any:
        with tf.Graph().as_default():
            like = tf.convert_to_tensor(arguments["initial_value"]())
        made.append(empty_variable(like, arguments))
        return made[-1]

    def body(x: Any) -> list[Any]:
        with graphs.attributes({"_smp_number": 3, "_smp_word": "a"}):
            with tf.init_scope():
                made or tf.Variable(lambda: tf.ones([2]))
            return [x * made[0]]

    graph = graphs.trace("self_test", body, [tf.TensorSpec([2], tf.float32)], creator)
    (product,) = (operation for operation in graph.get_operations() if operation.type == "Mul")
    assert graphs.attribute(product, "_smp_number") == 3
    assert graphs.attribute(product, "_smp_word") == "a"
    ((handle, inside),) = graphs.captures(graph)
    assert handle is made[0].handle
    made[0].assign([2.0, 3.0])

    copy = graphs.new_graph("copy")
    inputs = [graphs.placeholder(copy, graph.inputs[0]), graphs.placeholder(copy, inside)]
    copies = {id(graph.inputs[0]): inputs[0], id(inside): inputs[1]}
    for operation in graph.get_operations():
        if operation.type in ("ReadVariableOp", "Mul"):
            copied = graphs.copy_operation(
                copy, operation, [copies[id(t)] for t in operation.inputs], [], ("_smp_number",)
            )
            copies[id(operation.outputs[0])] = copied.outputs[0]
    assert graphs.attribute(copied, "_smp_number") is None
    function = graphs.function_of(copy, inputs, copied.outputs, [copied])

    def run(x: Any) -> Any:
        variable = made[0]
        with tf.GradientTape() as tape:
            read = variable.read_value()
            with unrecorded():
                graph = tf.compat.v1.get_default_graph()
                operation = graphs.call(
                    function, [x, graphs.capture(graph, handle)], executors.SINGLE_THREADED
                )
                graphs.keep(graph, [operation])
            result, *_ = with_gradient(
                [operation.outputs[0], read], lambda dy, _: [None, 5.0 * dy], "SmpSelfTest"
            )
        return result, tape.gradient(result, variable)

    product, gradient = tf.function(run, autograph=False)(tf.constant([1.0, 1.0]))
    assert product.numpy().tolist() == [2.0, 3.0]
    assert gradient.numpy().tolist() == [5.0, 5.0]
    free(made[0])
