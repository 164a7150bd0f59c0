"""For all tests."""

import signal

# A shell starts background jobs with SIGINT ignored, and the programs that tests start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
