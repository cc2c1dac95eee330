"""The load of each rank (one copy of the model, at a node) as the controller knows it, and the least loaded rank."""
