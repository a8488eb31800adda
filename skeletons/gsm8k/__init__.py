"""Grade-school arithmetic (GSM8K): a reader, a solver and a checker in a row."""

from skeletons.gsm8k.workload import load

__all__ = ["load"]
