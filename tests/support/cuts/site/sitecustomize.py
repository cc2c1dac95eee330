"""Python imports this at its start in the processes that a cut's test starts: `cut_hook` extends their path."""

import cut_hook

cut_hook.from_environment()
