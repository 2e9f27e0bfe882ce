"""Graph passes: rewrites of an FX graph before it is planned."""
