"""A quicker simulation: production scheduler, policies and block accounting, with decode steps taken in bursts."""
