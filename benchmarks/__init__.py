"""Six questions about speed and memory: engine, peers, aggregation, wire, scaling, gpu."""
