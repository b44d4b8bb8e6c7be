"""The fault matrix: what breaks, what must hold, and a control for each protection that shows it at work.

Every family has a sample that CI takes and a full size that `scripts/faults` runs; both are the same test. The rows are
numbered as in the tests' own first lines. Those that need a launcher, W&B, a scheduler or several processes stand with
the tests of these: jobs and drivers that die (R8, R9) in test_launchers.py, W&B that fails (R12) in test_sync.py and
test_mirror.py, SLURM (R13) in test_slurm.py, a process of a distributed run (R14) in test_distributed.py.
"""
