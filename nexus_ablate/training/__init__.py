"""Training: optimizer, loop, checkpoints. Nothing here knows an axis or an option."""
