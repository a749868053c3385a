"""Tools of the tests."""
