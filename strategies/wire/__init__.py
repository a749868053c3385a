"""Arrays on the wire: records, the safetensors format, compression."""
