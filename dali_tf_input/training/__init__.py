"""Feeding Keras: one pipeline per replica, epochs, resuming, and what went wrong."""
