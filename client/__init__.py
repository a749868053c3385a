"""The client half: a message in, a trained model out."""
