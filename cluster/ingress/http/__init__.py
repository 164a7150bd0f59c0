"""Connections, requests' bytes and errors: HTTP without any API's bodies."""
