"""What a running cluster is: its workers, their devices, and what is installed on its hosts."""
