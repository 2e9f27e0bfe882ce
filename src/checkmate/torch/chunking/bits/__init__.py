"""Bits: whether pieces give what their whole ops give, byte for byte."""
