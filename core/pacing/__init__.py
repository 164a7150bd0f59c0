"""Which sequences a step serves, and how much of their prompts, so that all meet their deadlines."""
