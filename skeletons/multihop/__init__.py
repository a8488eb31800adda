"""Multi-hop questions over Wikipedia paragraphs that are dealt out to researchers."""

from skeletons.multihop.load import load

__all__ = ["load"]
