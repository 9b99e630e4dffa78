"""Find, convert, admit and read checkpoints. Only this package imports transformers."""
