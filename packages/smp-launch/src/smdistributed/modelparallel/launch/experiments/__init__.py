"""Experiments, their trials, and what was logged for these.

records     a file of JSON for each of them
search      which documents an expression is true of
jobs        what a job tells about itself, as a component of a trial
service     the operations, by the names that the service has for them
"""
