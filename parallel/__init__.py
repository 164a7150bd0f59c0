"""Many ranks for one instance: where each stands, what of the model it holds, and how they talk."""
