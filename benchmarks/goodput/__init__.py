"""Which load a fleet serves within its targets, on simulated devices."""
