"""The pipeline engine: capture a step, cut it into segments, schedule them, execute them.

The steps, each in a module of its own, in the order in which the first call of a step function
takes them: ``capture`` runs the user's code on fake tensors and records an ``ir.Graph``;
``segments`` cuts the graph along the partition; ``program`` compiles this rank's segments;
``executor`` runs them in the order that the shared simulator found.
"""
