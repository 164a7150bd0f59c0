"""How long a test waits for what must come."""

PATIENCE_S = 60.0
"""A test that passes never waits this long on an idle machine. Beside other work a process takes seconds to start."""
