"""The production workers and policies under a virtual-time event loop, with modelled devices and links."""
