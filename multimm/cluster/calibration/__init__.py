"""Rates of workers and links: measured, and kept between runs."""
