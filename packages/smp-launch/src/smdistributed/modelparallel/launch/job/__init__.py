"""A job: a folder with the document, its data, its results, and one status that is always whole.

repository  a clone of the script's repository
code        the archive of a script and what it imports
folder      the folder and who may write in it
status      how a job stands
detached    processes that outlive who starts them
contract    files, variables and arguments that a script sees: pure functions
clusters    how processes find each other that MPI does not start
commands    what is run for a job, and where
warden      ends a script whose supervisor is gone
running     runs it, keeps its output, and ends it
feeding     the process that feeds the pipes of a host
versions    what the files of a folder were, whole and in order
checkpoints a folder that is kept in step with an address
metrics     numbers in the log
results     archives of what the script left
requirements  what a script needs beside this environment
supervisor  all of that in order; ``python -m`` it with a job's folder
literal_paths  /opt/ml for scripts that have it in their text
logs        shows the log while it grows
"""
