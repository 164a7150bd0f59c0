"""Measures, before anything is placed there, whether every node, and every link between two nodes, is fit to serve."""
