"""From a study to what is to be done: arms, matching, cost, jobs, looks and the plan that is shown before launch."""
