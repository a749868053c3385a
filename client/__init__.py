"""The client's part: it receives a message and replies with a trained model."""
