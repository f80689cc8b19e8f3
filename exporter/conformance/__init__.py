"""Conformance: the invariants that any bundle must hold on any machine, each as a check that can fail."""
