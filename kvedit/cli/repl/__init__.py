"""The REPL: its loop, its terminal, completion, and healing in the background."""
