"""How long steps take and how much memory ranks need: models without a device."""
