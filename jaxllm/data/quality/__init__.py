"""What is in the data: duplicates, lengths and languages, text of evaluations that must not be trained on."""
