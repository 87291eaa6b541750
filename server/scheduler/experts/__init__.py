"""Where experts lie: observed load, copies of hot experts, and the tables that follow."""
