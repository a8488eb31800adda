"""Sub-agents that say why they can't act: judging, curating and measuring what they should have said.

The wire format and its parser are in `splice.abstention`; the engine reads them at run time. Here is
what happens apart from runs, on recorded interactions.
"""
