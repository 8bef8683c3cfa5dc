"""Key-value buckets (ADR-8)."""
