"""Which instances sleep, and when they shall sleep and wake up."""
