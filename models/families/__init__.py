"""The supported families: each reads its config.json into a `ModelSpec`."""
