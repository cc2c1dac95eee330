"""The screen of `pdbus top` and its keys."""
