"""Each command of the results pages runs, and its JSON has the figures of the page."""
