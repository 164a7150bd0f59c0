"""The live status page: one HTML file without external assets, which asks /cluster for what it shows."""
