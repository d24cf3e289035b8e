"""What runs on workers: pure functions on blocks."""
