"""Additions that show the seams: each is one new file here and one row in a table of the package."""
