"""What laws raise."""


class Broken(AssertionError):
    """`law` names what did not hold, `rid` whose it was, if it was a request's."""

    def __init__(self, law: str, what: str, rid: str = "") -> None:
        super().__init__(f"{law}: {what}")
        self.law = law
        self.rid = rid
