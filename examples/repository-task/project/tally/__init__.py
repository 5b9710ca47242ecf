"""Adds up the hours of a time sheet."""
