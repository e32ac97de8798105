"""The plan: prefix tree, order, lifetimes and cost. No torch."""
