"""The files of a session on disk."""
