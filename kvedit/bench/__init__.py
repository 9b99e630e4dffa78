"""The laboratory: cases, trials, runs and reports that say where a budget is best spent."""
