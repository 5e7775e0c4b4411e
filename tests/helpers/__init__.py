"""Small models and data that several tests share."""
