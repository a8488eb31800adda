"""ToolBench: requests with API documents, replayed responses and a judge model."""

from skeletons.toolbench.workload import load

__all__ = ["load"]
