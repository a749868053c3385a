"""K models as one buffer: layout, mixing, selection of collaborators, similarity."""
