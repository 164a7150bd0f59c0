"""Draft heads: MTP layers and EAGLE-3."""
