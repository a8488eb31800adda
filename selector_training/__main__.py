"""`python -m selector_training` is `splice selector`."""

from selector_training.cli import app
from splice.cli import run_app

run_app(app, "python -m selector_training")
