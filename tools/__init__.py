"""Generators of pages and pictures of the documentation, and fits of constants."""
