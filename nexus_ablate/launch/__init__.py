"""From a study to its runs: arms, jobs, what runs them, and the states of their directories."""
