"""Published schedulers of others behind one seam, so that the same simulator runs them and ours."""
