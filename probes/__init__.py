"""Probe pools: what each candidate edge would have done, found out offline."""
