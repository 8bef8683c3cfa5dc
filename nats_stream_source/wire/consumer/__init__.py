"""What a consumer delivers: sequences, statuses, gaps, and the ordered consumer's state."""
