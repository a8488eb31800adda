"""Functions to complete (HumanEval): an analyst, a programmer and a reviewer in a row."""

from skeletons.humaneval.workload import load

__all__ = ["load"]
