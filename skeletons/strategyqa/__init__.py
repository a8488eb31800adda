"""Yes-or-no questions with hidden steps (StrategyQA): facts dealt over three researchers."""

from skeletons.strategyqa.workload import load

__all__ = ["load"]
