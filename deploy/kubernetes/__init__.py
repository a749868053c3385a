"""A federation on Kubernetes."""
