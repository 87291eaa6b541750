"""Compiled products: plain and quantised weights, single ones and experts."""
