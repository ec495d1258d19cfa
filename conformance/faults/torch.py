"""Faults of smp-torch."""

from __future__ import annotations

from conformance.faults import Mutation

MUTATIONS = (
    # What comes back from a step.
    Mutation(
        "a sum for a mean",
        "torch/stepping/output.py",
        'self._stacked("reduce_mean").mean(0)',
        'self._stacked("reduce_mean").sum(0)',
        ("reduce_mean_averages_over_microbatches",),
    ),
    Mutation(
        "a mean for a sum",
        "torch/stepping/output.py",
        'self._stacked("reduce_sum").sum(0)',
        'self._stacked("reduce_sum").mean(0)',
        ("reduce_sum_adds_over_microbatches",),
    ),
    Mutation(
        "outputs joined along the wrong axis",
        "torch/stepping/output.py",
        "return torch.cat(self._outputs)",
        "return torch.cat(self._outputs, -1)",
        ("concat_restores_the_batch",),
    ),
    Mutation(
        "outputs in reverse",
        "torch/stepping/output.py",
        "return self._outputs\n",
        "return self._outputs[::-1]\n",
        ("outputs_are_those_of_the_microbatches_in_order",),
    ),
    Mutation(
        "shapes that differ go unnoticed",
        "torch/stepping/output.py",
        "if len(set(shapes)) > 1:",
        "if False:",
        ("outputs_of_several_shapes_are_not_reduced",),
    ),
    # How arguments are cut.
    Mutation(
        "the split axis is ignored",
        "common/microbatch.py",
        "tensors.narrow(value, _positive(axis, tensors.shape(value)), start, sizes[index])",
        "tensors.narrow(value, 0, start, sizes[index])",
        ("an_input_can_be_split_along_another_axis",),
    ),
    Mutation(
        "the last examples are dropped",
        "common/microbatch.py",
        "return [size + 1] * larger + [size] * (microbatches - larger)",
        "return [size] * microbatches",
        ("a_batch_that_does_not_divide_is_cut_unevenly",),
    ),
    Mutation(
        "smp_slice is given its numbers in the wrong order",
        "common/microbatch.py",
        "value.smp_slice(len(sizes), index, axis)",
        "value.smp_slice(index, len(sizes), axis)",
        ("objects_that_can_split_themselves_are_asked",),
    ),
    Mutation(
        "slices of objects are those of the first microbatch",
        "torch/stepping/lockstep.py",
        "call = batch.calls[position]",
        "call = batch.calls[0]",
        ("objects_that_can_split_themselves_are_asked",),
    ),
    Mutation(
        "batches of several sizes go unnoticed",
        "common/microbatch.py",
        "if any(size != batch for _, size in found.values()):",
        "if False:",
        ("batches_that_cannot_be_cut_are_refused",),
    ),
    # Ranks and groups.
    Mutation(
        "the group of the other kind",
        "common/facade.py",
        "return self._members(CommGroup.DP_GROUP)",
        "return self._members(CommGroup.MP_GROUP)",
        ("dp_group_holds_one_partition",),
    ),
    Mutation(
        "a rank off by one",
        "common/facade.py",
        "return self._slot.get().coordinates.dp_rank",
        "return self._slot.get().coordinates.dp_rank + 1",
        ("dp_rank_of_every_process",),
    ),
    Mutation(
        "the size of the model for that of the data",
        "common/facade.py",
        "return self._slot.get().topology.dp_size",
        "return self._slot.get().topology.mp_size",
        ("dp_size_of_every_process",),
    ),
    Mutation(
        "placements are one and the same",
        "common/topology.py",
        "return PLACEMENT_ALIASES.get(self.placement, self.placement)",
        'return "DPT"',
        ("every_placement_of_eight_processes",),
    ),
    # Objects between processes.
    Mutation(
        "objects in reverse",
        "common/comm/communicator.py",
        "payloads = [payload, *(item for _, _, item in arrived)]",
        "payloads = [payload, *(item for _, _, item in arrived)][::-1]",
        ("rank_numbers_the_processes",),
    ),
    Mutation(
        "a barrier that does not wait",
        "common/comm/communicator.py",
        'self._exchange(f"barrier({_name(group, CommGroup)})", b"", group)',
        "_name(group, CommGroup)",
        ("barrier_waits_for_everyone",),
    ),
    Mutation(
        "a broadcast that forgets the last",
        "common/comm/communicator.py",
        "others = [rank for rank in self._members(group) if rank != self._transport.rank]",
        "others = [rank for rank in self._members(group) if rank != self._transport.rank][:-1]",
        ("broadcast_is_called_by_the_sender_and_received_by_the_others",),
    ),
    Mutation(
        "a barrier of everyone for that of a group",
        "common/facade.py",
        "self.barrier(CommGroup.DP_GROUP)",
        "self.barrier(CommGroup.WORLD)",
        ("dp_barrier_waits_for_the_replicas_of_a_partition",),
    ),
    # Parameters.
    Mutation(
        "the dictionary wins over the launch",
        "common/config/loading.py",
        '**_recognise(read_launch(environ, problems), framework, "launch", problems),\n    }',
        "}",
        ("launch_values_win_over_the_dictionary",),
    ),
    # Gradients.
    Mutation(
        "gradients are summed over replicas",
        "torch/gradients/reduction.py",
        "return allreduce_hook(self._replicas.group, bucket.handle)  # type: ignore[arg-type]",
        "bucket.flat.mul_(self._replicas.size)\n"
        "        return allreduce_hook(self._replicas.group, bucket.handle)",
        ("gradients_are_those_of_the_global_batch",),
    ),
    Mutation(
        "gradients are never reduced",
        "torch/gradients/reduction.py",
        "            parameter.grad.copy_(view)",
        "            pass",
        ("gradients_are_those_of_the_global_batch",),
    ),
    Mutation(
        "a gradient replaces the one before it",
        "torch/execute/executor.py",
        "gradients[index] = gradient if known is None else known + gradient",
        "gradients[index] = gradient",
        ("shared_values_gather_their_gradients",),
    ),
    Mutation(
        "gradients of microbatches are not averaged",
        "torch/gradients/data_parallel.py",
        'return "mean" if averages and not self._reduction.has_hook else "sum"',
        'return "sum"',
        ("gradients_are_those_of_the_global_batch",),
    ),
    Mutation(
        "the norm of one partition",
        "torch/gradients/norm.py",
        "together = torch.stack(parts)",
        "together = torch.stack([part])",
        ("the_norm_of_gradients_is_the_whole_model_s",),
    ),
    Mutation(
        "an overflow is a rank's own affair",
        "torch/gradients/overflow.py",
        "if any(optimizer in (each, each.optimizer) for each in runtime.live_optimizers()):",
        "if False:",
        ("all_ranks_skip_the_same_updates",),
    ),
    # Partitions and state.
    Mutation(
        "the outer context wins",
        "torch/building/manual_partition.py",
        "self._of[module] = self._open[-1]",
        "self._of[module] = self._open[0]",
        ("contexts_decide_the_partition",),
    ),
    Mutation(
        "modules below keep their partition",
        "torch/building/manual_partition.py",
        "for inner in module.modules():\n            self._of[inner] = index",
        "pass",
        ("set_partition_moves_modules_of_a_finished_model",),
    ),
    Mutation(
        "partial files are named by replica",
        "torch/checkpoint/rank_files.py",
        "return str(place.mp_rank)",
        "return str(place.rdp_rank)",
        ("partial_files_are_named_by_rank",),
    ),
    Mutation(
        "the optimizer's state is left out of checkpoints",
        "torch/checkpoint/save.py",
        'files[f"optimizer_{part}.pt"] = _writer(optimizer.local_state_dict)',
        "pass",
        ("training_resumes_from_a_partial_checkpoint",),
    ),
    Mutation(
        "user content is lost",
        "torch/checkpoint/save.py",
        "files[USER_CONTENT] = _writer(lambda: user_content)",
        "pass",
        ("training_resumes_from_a_partial_checkpoint",),
    ),
    Mutation(
        "cpu() gathers nothing",
        "torch/model/distributed.py",
        "self._state.gather_tensors()",
        "pass",
        ("cpu_gathers_the_whole_model",),
    ),
    Mutation(
        "the partition is not announced",
        "torch/model/holder.py",
        "return self._placement is not None or self._is_whole",
        "return False",
        ("partitioned_turns_true_in_the_first_step",),
    ),
    Mutation(
        "a base class's forward is the module's own",
        "torch/compat/original_forward.py",
        "order if asking is None else order[order.index(asking) + 1 :]",
        "order",
        ("forwards_of_base_classes_can_be_called",),
    ),
)
