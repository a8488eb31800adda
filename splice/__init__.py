"""SPLICE: repair fixed workflows of LLM agents, query by query."""
