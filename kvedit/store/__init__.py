"""A session's files on disk."""
