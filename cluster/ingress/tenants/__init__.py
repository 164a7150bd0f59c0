"""Who may ask for how much: keys, tenants, limits and fair shares."""
