"""A config file that says nothing: every setting at its default."""
