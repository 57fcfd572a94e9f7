"""Commands that check, explore and predict before anything is run."""
