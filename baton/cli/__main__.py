"""`python -m baton.cli`."""

from baton.cli.main import main

main()
