"""What a model is fed: frozen descriptions that both backends read."""
