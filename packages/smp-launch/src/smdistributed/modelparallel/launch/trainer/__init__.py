"""Version 3 of the service's SDK: ``ModelTrainer`` and what it is given.

configs         what to run, on what, with which data
distributed     what starts the processes
shipping        uploads the code
resources       a job that there is
model_trainer   writes the document from all of these, and starts the job
"""
