"""How fast the engine is, what a trial executes and what a trace weighs, beside other engines.

    python -m benchmarks --markdown

See `benchmarks/README.md`.
"""
