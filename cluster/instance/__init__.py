"""One instance: its engine, workers, transports and memory, assembled in one process."""
