"""Experiments by the names of the service's libraries.

logs        what is logged to a component
records     experiments, trials and components
tracker     logs to a component, as ``smexperiments`` has it
run         logs to a component, as the SDK has it
"""

from smdistributed.modelparallel.launch.tracking.records import Experiment, Trial, TrialComponent
from smdistributed.modelparallel.launch.tracking.run import Run, list_runs, load_run
from smdistributed.modelparallel.launch.tracking.tracker import Tracker

__all__ = [
    "Experiment",
    "Run",
    "Tracker",
    "Trial",
    "TrialComponent",
    "list_runs",
    "load_run",
]
