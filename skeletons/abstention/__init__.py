"""Requests that an agent should carry out, or abstain from and say why."""

from skeletons.abstention.calls import is_well_formed
from skeletons.abstention.load import load
from skeletons.abstention.references import gold_output, gold_rationale

__all__ = ["gold_output", "gold_rationale", "is_well_formed", "load"]
