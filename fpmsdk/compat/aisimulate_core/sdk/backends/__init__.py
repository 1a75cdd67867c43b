"""Serving engines of static estimates."""
