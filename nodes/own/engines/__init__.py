"""The engines, which compute. `base` is the interface; `torch` and `numpy` run a real model, `sim` a timing model."""
