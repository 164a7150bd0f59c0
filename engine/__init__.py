"""One instance's engine: block accounting, step planning, the model runner and the loop that drives them."""
