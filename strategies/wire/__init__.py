"""Messages between server and clients: content, records, the safetensors format, compression."""
