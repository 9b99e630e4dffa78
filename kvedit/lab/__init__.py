"""The implementation of `kvedit bench`: cases, trials, runs and reports."""
