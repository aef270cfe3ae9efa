"""AdamW in one pass over each parameter, and Muon."""
