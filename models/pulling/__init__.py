"""Models fetched from hubs, buckets and URLs into the cache."""
