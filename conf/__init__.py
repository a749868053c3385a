"""Configuration: YAML groups, composition and validation."""
