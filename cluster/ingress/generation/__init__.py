"""From a checked request to an answer, whichever API asked for it."""
