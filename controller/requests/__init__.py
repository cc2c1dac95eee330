"""The life of requests at the controller: accepted, placed, dispatched, retried, ended exactly once."""
