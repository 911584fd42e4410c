"""Compiling a run for devices that this machine does not have, and what the program says about it."""
