"""Training jobs by estimators, on this machine; imports no machine-learning framework.

pytorch, tensorflow, huggingface   an estimator for each framework: what notebooks import
estimator                          what they share: check, describe, fit, attach
session, inputs                    where jobs live and what they read
cli                                ``smp-launch``: jobs from a shell
backends                           who runs a job: this machine
job                                a job as a folder, and the supervisor that runs it
channels                           how a job gets its data
storage                            files behind addresses
request                            the one document that describes a job
"""
