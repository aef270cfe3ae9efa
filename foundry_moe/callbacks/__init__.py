"""Composer callbacks."""
