"""A write that goes on while training does: on a thread of its own, from host memory, one at a time.

Takes what is to be called; says whether it has ended, and raises in the caller's thread what it raised in its own.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWrite:
    """One write. The process does not end before it has."""

    def __init__(self, write: Callable[[], None]) -> None:
        """Begin."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._future: Future[None] = executor.submit(write)
        executor.shutdown(wait=False)

    @property
    def is_done(self) -> bool:
        """True when it has ended, well or not."""
        return self._future.done()

    def finish(self) -> None:
        """Wait for its end; raises what it raised."""
        self._future.result()
