"""The load of each rank as the controller knows it, and the least loaded rank."""
