"""Workflows as data: topologies to start from, and benchmark workloads."""

from skeletons.loading import load, names

__all__ = ["load", "names"]
