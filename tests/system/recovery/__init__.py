"""Real processes that die, freeze, are cut off, join late or leave."""
