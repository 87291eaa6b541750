"""Tests of the scheduler: the policy on a virtual clock, the service on a fake channel."""
