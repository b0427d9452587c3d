"""Commands of the program; each is imported when it is called."""
