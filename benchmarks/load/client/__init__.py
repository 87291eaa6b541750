"""The sending side of a load test: requests at their times, and a record of each."""
