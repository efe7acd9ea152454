"""Training with Keras: one pipeline per replica, epochs, resuming, and diagnosis of failures."""
