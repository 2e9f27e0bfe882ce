"""Private names of Inductor for the code that it generates."""
