"""The model at run time: one network, one walk through its layers, decoding."""
