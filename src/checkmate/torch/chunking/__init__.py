"""Chunking: ops on a large array run piece by piece, and the array never exists whole."""
