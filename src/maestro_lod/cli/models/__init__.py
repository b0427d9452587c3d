"""Models of the built-in recipes."""
