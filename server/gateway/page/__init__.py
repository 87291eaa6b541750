"""The page that a browser shows: its own files, and nothing from elsewhere.

Knows no request of the API: its modules send those as any client does.
"""
