"""API-Bank: tool dialogues whose facts are spread over agents, with replayed calls."""

from skeletons.api_bank.workload import load

__all__ = ["load"]
