"""The one internal request: what every API makes of its own body, and all that is behind the APIs reads."""
