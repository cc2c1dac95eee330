"""`python -m pdbus` is the `pdbus` command."""

from pdbus.cli import main

main()
