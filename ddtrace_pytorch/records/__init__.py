"""What the user's own code says: spans, events and scalars, with the step they belong to."""
