"""The laboratory behind `kvedit bench`: cases, trials, runs and reports."""
