"""A limit for work that takes milliseconds if it is linear and hours if it is not."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def soon(cpu_seconds: int = 30) -> Iterator[None]:
    """Stop what has used far more processor time than it ever should.

    Processor time of this process, so that a busy machine changes nothing.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"not done after {cpu_seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
