"""`topspin trace`: fetches stamps from a running server, reports, exports and draws them."""
