"""What people see of a run and of a repair: pages of text, tables, and HTML.

Whatever comes from a query, an agent, a tool or a file may be hostile. In text, every character
that could drive a terminal or reorder a line is shown as an escape; in HTML it is escaped twice,
for the eye and for the parser.
"""
