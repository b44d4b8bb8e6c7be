"""Execution of runs: the queue and its workers, SLURM, Hydra multiruns, and the status of each run."""
