"""The command line: verbs, the boundary that prints errors, and what a person sees."""
