"""What others do: published schedulers behind one seam, so that the same simulator runs them and ours."""
