"""The model at run time: a network, the walk through its layers, and decoding."""
