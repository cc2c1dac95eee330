"""A cluster seen from outside, over time: the source of its statuses, its figures, and what is wrong with it."""
