"""Methods that do not wait for a round: visits, one after another, on a real or a virtual clock."""
