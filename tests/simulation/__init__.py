"""A whole cluster in one process and in virtual time: the parts' own shells over a network of ours, by seed."""
