"""Search for the engines and the fleet of a plan."""
