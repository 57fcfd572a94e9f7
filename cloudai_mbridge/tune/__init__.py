"""The search for the best configuration: which layouts there are, how fast each is predicted to be, what to try."""
