"""Workflows as data."""
