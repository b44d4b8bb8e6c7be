"""What choices cost on the machine at hand: time, traffic, memory, and how far the hardware is from being used up."""
