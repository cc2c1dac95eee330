"""`pdbus calibrate`: the duration of an engine's steps, for the sim engine, `pdbus replay` and `pdbus plan`.

`probe` runs legs on a runner and records the time of each token, `measure` chooses the legs and computes points from
them, `fit` makes the timing model, `engines` opens the runners, and `check` compares a live run with its replay.
"""
