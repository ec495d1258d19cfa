"""The one document that describes a job, and what is said in it.

arguments         the table of the estimators' arguments
distribution      how ``distribution=`` becomes hyperparameters
hyperparameters   how they are written and read
machines          what is known of types of hosts
naming            names of jobs and images
document          the document, checked
serving           the documents of models and endpoints
"""
