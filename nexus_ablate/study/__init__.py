"""Studies: a question, a baseline, its arms and seeds; what they cost; and the queue that runs what is missing."""
