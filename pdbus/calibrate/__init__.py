"""`pdbus calibrate`: how long an engine's steps take, for the sim engine, `pdbus replay` and `pdbus plan`.

`probe` runs legs on a runner and notes when each token came, `measure` chooses which and what they tell, `fit` makes
the model of timing of that, `engines` opens the runners, `check` holds a live run against its replay.
"""
