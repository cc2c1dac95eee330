"""A rank's link to the rest: controllers, clients, the bus, other ranks."""
