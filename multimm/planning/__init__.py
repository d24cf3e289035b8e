"""Plans: pure values and integers, made before anything runs."""
