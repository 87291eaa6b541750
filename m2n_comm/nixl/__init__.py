"""Rows carried by NIXL (RDMA across hosts): its agent, its lines, and how a pair is opened."""
