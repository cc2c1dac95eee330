"""The base of every pdbus process: loop, sockets, keys, services, logs, metrics and command lines."""
