"""What a plan promised, measured before requests come: the steps, and the comparison."""
