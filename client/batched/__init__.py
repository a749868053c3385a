"""All clients of a round trained as one computation."""
