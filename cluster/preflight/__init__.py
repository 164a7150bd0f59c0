"""Is every node, and every link between two nodes, fit to serve? Measured before anything is placed there."""
