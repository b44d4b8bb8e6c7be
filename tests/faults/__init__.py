"""The fault matrix: what breaks, what must hold, and a control for each protection that shows it at work.

Every family has a sample that CI takes and a full size that `scripts/faults` runs; both are the same test.
"""
