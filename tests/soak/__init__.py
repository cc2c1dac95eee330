"""The soak: a cluster under load whose processes keep dying, and a ledger of what became of every request.

`run` does it all; `Ledger` judges outcomes, `Chaos` breaks processes and mends them, `Attackers` attack beside it. The
fault suite and the hostile one use these.
"""

from soak.chaos import Chaos
from soak.ledger import Ledger
from soak.run import SoakConfig, run

__all__ = ["Chaos", "Ledger", "SoakConfig", "run"]
