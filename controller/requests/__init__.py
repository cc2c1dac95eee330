"""The life of requests: accepted, placed, dispatched, retried, ended exactly once."""
