"""What a rank is working on."""
