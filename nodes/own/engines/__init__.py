"""Engines: what computes. `base` is the interface; `torch` runs a real model, `sim` a timing model."""
