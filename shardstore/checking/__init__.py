"""What is wrong with a store."""
