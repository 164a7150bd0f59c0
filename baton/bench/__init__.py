"""Puts load on an OpenAI endpoint and reports what it measured: workloads, the timed client, statistics and reports."""
