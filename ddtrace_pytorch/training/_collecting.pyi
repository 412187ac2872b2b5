from ddtrace_pytorch.lifecycle import Lifecycle

class Collections:
    """A member of ``gc.callbacks``: adds up, in `ns`, the collections that matter, and tags the step of each."""

    @property
    def ns(self) -> int: ...
    def __call__(self, phase: str, info: dict[str, int], /) -> None: ...

def collections(lifecycle: Lifecycle, at_least: int, /) -> Collections:
    """Those of the oldest generation, and what takes `at_least` so many ns, while `lifecycle` has a session."""
