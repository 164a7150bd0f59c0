"""What an ingress keeps for clients, within bounds."""
