"""Claims of papers and issues that this project stands on, each rerun by one command: see docs/papers.md."""
