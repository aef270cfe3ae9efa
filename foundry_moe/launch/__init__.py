"""Before training: a run's configuration and its checks, spare ranks, launchers, and the report of a user's mistake."""
