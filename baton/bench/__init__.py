"""Load on an OpenAI endpoint, and what it measured: workloads, the timed client, statistics and reports."""
