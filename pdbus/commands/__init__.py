"""The subcommands of `pdbus`, one file each; `pdbus.cli` lists them."""
