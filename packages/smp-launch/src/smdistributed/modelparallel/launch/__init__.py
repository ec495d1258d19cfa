"""Training jobs by estimators, on machines of one's own; imports no machine-learning framework.

pytorch, tensorflow, huggingface   an estimator for each framework: what notebooks import
estimator, deployment              what they share: check, describe, fit, attach; deploy
model, predictor                   a model that is served, and an endpoint as a function
serializers, deserializers         what requests and answers are made of
session, inputs                    where jobs live and what they read
s3, analytics                      copies of data, and tables of metrics
debugger                           settings of the service's debugger that notebooks import
names                              the names of the service's SDK, for notebooks as they are
notebooks                          runs a notebook from a shell
api                                the interface of the service, for the SDK and boto3
cli                                ``smp-launch``: jobs from a shell
backends                           who runs a job: this machine, or Slurm
serving                            models behind endpoints
job                                a job as a folder, and the supervisor that runs it
channels                           how a job gets its data
storage                            files behind addresses
request                            the one document that describes a job
"""

from __future__ import annotations


def load_ipython_extension(ipython: object) -> None:
    """Called by ``%load_ext smdistributed.modelparallel.launch`` in a notebook."""
    from smdistributed.modelparallel.launch import names

    names.install()
