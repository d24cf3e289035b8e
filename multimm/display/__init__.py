"""What users read: numbers in units, and parts of pages for notebooks."""
