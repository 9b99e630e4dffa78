"""Policies: what scores rows and units. One file and one line of `registry` each."""
