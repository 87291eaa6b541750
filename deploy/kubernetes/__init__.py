"""Kubernetes manifests of an engine."""
