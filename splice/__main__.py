"""`python -m splice` is the command line."""

from splice.cli import main

main()
