"""What every process of ours runs on: loop, sockets, keys, services, logs, metrics, command lines."""
