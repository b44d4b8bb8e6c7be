"""Carrying runs out: the queue and its workers, SLURM, Hydra multiruns, and what became of each run."""
