"""What choices cost on this machine: time, memory traffic, memory, and use of the hardware."""
