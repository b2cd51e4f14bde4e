"""Profiles of any program in one form, and where their measured steps go."""
