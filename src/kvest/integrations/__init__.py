"""Other people's packages, for those who have them. Nothing here is imported unless it is asked for."""
