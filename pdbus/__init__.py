"""The front door: the client library and the names that embedders import."""
