"""``smprun``: starts a job on one or several hosts, relays its output and reports who failed first.

cli            reads the command line, and calls the others in this order
settings       merges the configuration from its sources
hosts          the host list, and which rank runs where
slurm          the hosts of an allocation of Slurm
mpi_options    turns Open MPI 4 options into those of Open MPI 5
command        mpirun's command line and environment
dry_run        shows all of the above instead of starting the job
job            runs mpirun and sees to it that the job ends
restarts       starts the job again after it has lost a rank
output         takes mpirun's output apart, rank by rank, and shows it
first_failure  decides which rank failed first
processes      finds and kills every process of the job
status         tells where the ranks are
listening      the signals by which ranks are asked
ending         asks ranks to end, and gives them time
bootstrap      what each rank runs
copies         decides whether ranks are copies of one process
gpus           tells which GPUs a host has
fork_client    starts the process whose copies are the ranks
fork_server    what that process does
stand_in       what mpirun starts then, in the place of each rank
"""
