"""What a user reads of a plan: text, a page for notebooks, and what became of the prediction."""
