"""Faults of smp-tf."""

from __future__ import annotations

from conformance.faults import Mutation

MUTATIONS = (
    Mutation(
        "a sum for a mean",
        "tensorflow/stepping/output.py",
        'self._sum("reduce_mean", self._weighted())',
        'self._sum("reduce_mean", self._outputs)',
        ("reduce_mean_averages_over_microbatches",),
    ),
    Mutation(
        "a mean for a sum",
        "tensorflow/stepping/output.py",
        'self._sum("reduce_sum", self._outputs)',
        'self._sum("reduce_sum", self._weighted())',
        ("reduce_sum_adds_over_microbatches",),
    ),
    Mutation(
        "outputs joined along the wrong axis",
        "tensorflow/stepping/output.py",
        "for each in self._outputs], axis=0)",
        "for each in self._outputs], axis=-1)",
        ("concat_restores_the_batch",),
    ),
    Mutation(
        "outputs in reverse",
        "tensorflow/stepping/results.py",
        "return StepOutput(leaves, weights)",
        "return StepOutput(leaves[::-1], weights)",
        ("outputs_are_those_of_the_microbatches_in_order",),
    ),
    Mutation(
        "microbatches weigh the same whatever their size",
        "tensorflow/stepping/output.py",
        "_scaled(each, weight) for each, weight",
        "_scaled(each, 1.0 / len(self.weights)) for each, _",
        ("means_of_uneven_microbatches_are_those_of_the_batch",),
    ),
    Mutation(
        "a sum begins with what was in the variable",
        "tensorflow/stepping/output.py",
        "[var.assign(like)]",
        "[var.assign_add(like)]",
        ("accumulate_takes_a_variable_of_the_caller",),
    ),
    Mutation(
        "contexts of a partition place nothing",
        "tensorflow/api/building.py",
        "graphs.attributes({PARTITION: index})",
        "graphs.attributes({PARTITION: 0})",
        ("contexts_place_what_is_made_inside",),
    ),
    Mutation(
        "one partition too many",
        "tensorflow/planning/placement.py",
        "if not 0 <= index < num_partitions:",
        "if not 0 <= index <= num_partitions:",
        ("partitions_that_do_not_exist_are_refused",),
    ),
    Mutation(
        "memory and speed are swapped",
        "tensorflow/planning/layers.py",
        '{"memory": 0.95, "speed": 0.5}',
        '{"memory": 0.5, "speed": 0.95}',
        (
            "memory_balances_the_bytes_of_variables",
            "speed_balances_the_number_of_variables",
        ),
    ),
    Mutation(
        "hooks are forgotten",
        "tensorflow/model/engine.py",
        "                hook()  # which may want to be called for the next model as well\n",
        "                pass\n",
        (
            "hooks_run_once_after_partitioning_and_before_the_first_forward_pass",
            "hooks_run_with_one_partition_too",
        ),
    ),
    Mutation(
        "hooks need not be functions",
        "tensorflow/api/building.py",
        "if not callable(hook):",
        "if False:",
        ("hooks_are_functions",),
    ),
    Mutation(
        "variables of other processes count as own",
        "tensorflow/model/distributed.py",
        "if not engine.is_partitioned or is_here(each)]",
        "]",
        ("every_layer_lives_on_one_process_of_the_replica",),
    ),
    Mutation(
        "a step without the model goes through",
        "tensorflow/stepping/function.py",
        "if not any(step.calls):",
        "if False:",
        ("a_step_without_the_model_is_refused",),
    ),
    Mutation(
        "steps in steps",
        "tensorflow/stepping/function.py",
        "if runtime.current_step is not None:",
        "if False:",
        ("steps_are_not_nested",),
    ),
    Mutation(
        "the platform's folder is unknown",
        "tensorflow/model/export.py",
        'os.environ.get("SM_MODEL_DIR") or DEFAULT_FOLDER',
        "DEFAULT_FOLDER",
        ("the_folder_is_that_of_the_platform",),
    ),
    Mutation(
        "weights of other processes are not saved",
        "tensorflow/model/whole_weights.py",
        "                variable.assign(value)\n",
        "                variable.assign(tf.zeros_like(value))\n",
        ("a_saved_model_is_whole_and_has_the_newest_weights",),
    ),
    Mutation(
        "gradients of half the size",
        "tensorflow/execute/backward.py",
        "dy if dy is not None else tf.zeros_like(output)",
        "0.5 * dy if dy is not None else tf.zeros_like(output)",
        (
            "gradients_come_from_a_tape",
            "gradients_come_from_the_graph",
        ),
    ),
    Mutation(
        "Python values do not count",
        "tensorflow/record/likeness.py",
        "return type(leaf), repr(leaf)",
        "return type(leaf), None",
        ("a_step_is_traced_anew_for_new_shapes_and_python_values_only",),
    ),
    Mutation(
        "schedule: always the simple one",
        "tensorflow/execute/order.py",
        "graph, len(microbatches), pipeline, active",
        'graph, len(microbatches), "simple", active',
        ("an_interleaved_schedule_runs_backwards_as_soon_as_it_can",),
    ),
    Mutation(
        "schedule: never the simple one",
        "tensorflow/execute/order.py",
        "graph, len(microbatches), pipeline, active",
        'graph, len(microbatches), "interleaved", active',
        ("a_simple_schedule_runs_all_forwards_first",),
    ),
    Mutation(
        "gradients of replicas are added up",
        "tensorflow/gradients/replicas.py",
        "return total / tf.cast(len(members), tensor.dtype)",
        "return total",
        ("gradients_that_the_library_averages_are_those_of_the_whole_batch",),
    ),
    Mutation(
        "slices of replicas are added up",
        "tensorflow/gradients/replicas.py",
        "share = values / tf.cast(len(members), values.dtype)",
        "share = values",
        ("slices_that_the_library_averages_are_those_of_the_whole_batch",),
    ),
    Mutation(
        "replicas begin with the weights of the last one",
        "tensorflow/gradients/replicas.py",
        "    is_first = runtime.rank == members[0]\n"
        "    with unnoted():\n"
        "        values = [variable.numpy() for variable in own] if is_first else None\n"
        "    everything = runtime.communicator.allgather(values, CommGroup.DP_GROUP)\n"
        "    for variable, value in zip(own, everything[0], strict=True):\n",
        "    is_first = runtime.rank == members[-1]\n"
        "    with unnoted():\n"
        "        values = [variable.numpy() for variable in own] if is_first else None\n"
        "    everything = runtime.communicator.allgather(values, CommGroup.DP_GROUP)\n"
        "    for variable, value in zip(own, everything[-1], strict=True):\n",
        ("variables_are_those_of_the_first_replica",),
    ),
    Mutation(
        "replicas begin with weights of their own",
        "tensorflow/model/engine.py",
        "        begin_alike(runtime, begun)\n",
        "",
        ("replicas_begin_with_the_weights_of_the_first",),
    ),
    Mutation(
        "fit trains replicas by gradients of their own",
        "tensorflow/model/keras_training.py",
        "[averaged(runtime, each) for each in given]",
        "list(given)",
        ("fit_averages_over_replicas",),
    ),
)
