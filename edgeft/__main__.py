"""`python -m edgeft`."""

from edgeft.cli import app

app()
