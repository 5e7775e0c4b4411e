"""State that moves between layouts."""
