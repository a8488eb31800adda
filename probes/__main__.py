"""`python -m probes` is `splice probes`."""

from probes.cli import app
from splice.cli import run_app

run_app(app, "python -m probes")
