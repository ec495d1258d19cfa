"""The service's interface on the loopback, for programs that stay as they are: the SDK and boto3.

signatures   whether a request comes from who may start programs here
operations   what is asked for, and what is answered: jobs and their logs
hosting      the same of models and endpoints
store        the object store: files, behind moto's protocol
server       one address for all of it
"""
