"""`mail` in the configuration."""

from pydantic import Field

from core.config.config_section import Section


class MailConfig(Section):
    """How long a silent process is believed to live."""

    heartbeat_s: float = Field(default=0.5, gt=0)
    """How often a process that has nothing to say to a peer tells it so."""
    peer_timeout_s: float = Field(default=5.0, gt=0)
    """A peer that has said nothing for so long is lost: its requests go on elsewhere."""
    reconnect_s: float = Field(default=2.0, gt=0)
    """How long a peer is looked for after a connection to it broke."""
