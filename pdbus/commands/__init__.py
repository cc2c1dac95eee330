"""The subcommands of `pdbus`, one file each; `pdbus.cli` lists them. A command's docstring is its help text. Errors of
ours (ConfigError, StartError, ...) end it with one line and an exit code, by `bus.runtime.cli`."""
